//! `migrate`: migrates a task to a host.

use crate::arguments::parse_task_tid;
use crate::command::{CommandSpec, Completion, ParsedCommand, VmCommand, WordKind};
use crate::outcome::Outcome;
use crate::output::progress::{Progress, Waited, ask_showing_progress};
use crate::output::transfer_amounts::TransferMeter;
use crate::parse_error::ParseError;
use crate::session::Session;
use crate::virtual_machine::{
    VirtualMachine, no_task_line, task_has_ended, unexpected_reply_error,
};
use libpvm::{Error, MigrateError};
use sempa_proto::engine::Engine;
use sempa_proto::event::{Event, EventKind};
use sempa_proto::migration::Step;
use sempa_proto::task::{MigrationReport, Reply, Request};
use sempa_proto::{HostId, Micros, PvmError, Tid};
use serde_json::json;

pub(crate) const SPEC: CommandSpec = CommandSpec {
    name: "migrate",
    summary: "Migrate a running task to another host",
    detail: "Syntax:  migrate tid host\n\
             Returns when the task runs there with all its memory, or reports the step that failed and why.\n\
             After a failure the task continues where it was.\n",
    parse: |args| parse(args).map(ParsedCommand::vm_command),
    completion: Completion::WordDependent(|args, _| match args {
        [] => (0, WordKind::Tid),
        [_] => (0, WordKind::Host),
        _ => (0, WordKind::Unknown),
    }),
    ..CommandSpec::DEFAULT
};

#[derive(Debug)]
struct MigrateCommand {
    tid: Tid,
    /// Name of the target.
    target: String,
}

fn parse(args: &[String]) -> Result<MigrateCommand, ParseError> {
    match args {
        [tid, host] => Ok(MigrateCommand {
            tid: parse_task_tid("migrate", tid)?,
            target: host.clone(),
        }),
        _ => Err(ParseError::WrongArgs("migrate")),
    }
}

impl VmCommand for MigrateCommand {
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        if task_has_ended(&session.vm, self.tid) {
            return Ok(Outcome::from_error(no_task_line(self.tid)));
        }
        let target = if self.target == "." {
            session.vm.local_host().tid().to_string()
        } else {
            self.target.clone()
        };
        let request = Request::Migrate {
            tid: self.tid,
            target,
            cause: None,
            wait_for_end: true,
        };
        let mut progress = MigrationProgress::new(self.tid, &self.target);
        let waited =
            ask_showing_progress(&session.vm, request, &mut progress, !session.prints_json);
        Ok(match waited {
            Ok(Waited::Reply(Reply::Migrated(Ok(report)))) => self.success_outcome(&report),
            Ok(Waited::Reply(Reply::Migrated(Err(error)))) => self.failure_outcome(&error.into()),
            Ok(Waited::Reply(_)) => return Err(unexpected_reply_error()),
            Ok(Waited::Interrupted(line)) => Outcome::from_error(line),
            Err(error) => self.failure_outcome(&error.into()),
        })
    }
}

/// The progress of one migration.
struct MigrationProgress {
    tid: Tid,
    target: String,
    /// The step after the last one that an event has reported.
    current_step: Step,
    /// Time of the last event by the clock of its host.
    last_event_at: Option<Micros>,
    /// The task's host; `None` before the first event.
    source: Option<HostId>,
    transfer: TransferMeter,
}

impl MigrationProgress {
    fn new(tid: Tid, target: &str) -> Self {
        Self {
            tid,
            target: target.to_string(),
            current_step: Step::ALL[0],
            last_event_at: None,
            source: None,
            transfer: TransferMeter::default(),
        }
    }
}

impl Progress for MigrationProgress {
    fn title(&self) -> String {
        format!("migrate {} to {}", self.tid, self.target)
    }

    fn handle_event(&mut self, event: &Event) -> Option<String> {
        let EventKind::MigrationStep {
            tid,
            from,
            step,
            bytes,
            ..
        } = event.kind
        else {
            return None;
        };
        if tid != self.tid {
            return None;
        }
        self.source = Some(from);
        let earlier_event_at = self.last_event_at.replace(event.at);
        let duration = earlier_event_at.map(|at| event.at.since(at));
        let position = Step::ALL.iter().position(|other| *other == step);
        let next_step = position.and_then(|index| Step::ALL.get(index + 1));
        self.current_step = next_step.copied().unwrap_or(step);
        Some(format!("{step} done{}", amount_text(bytes, duration)))
    }

    fn refresh(&mut self, machine: &dyn VirtualMachine) {
        let migrating_tid = self.tid;
        self.transfer
            .measure(machine, self.source, |tid| tid == migrating_tid);
    }

    fn current_step(&self) -> String {
        self.transfer.describe(self.current_step)
    }

    fn without_waiting(&self) -> &'static str {
        "the migration continues; 'pvm events' reports its end"
    }
}

/// Returns the size of a completed step and its rate; empty if the step has no size.
fn amount_text(bytes: u64, duration: Option<Micros>) -> String {
    let mib = bytes as f64 / f64::from(1 << 20);
    match duration.filter(|duration| duration.0 > 0) {
        _ if bytes == 0 => String::new(),
        None => format!(": {mib:.1} MiB"),
        Some(duration) => format!(": {mib:.1} MiB, {:.0} MiB/s", mib * 1e6 / duration.0 as f64),
    }
}

impl MigrateCommand {
    fn success_outcome(&self, report: &MigrationReport) -> Outcome {
        let (tid, target) = (self.tid, &self.target);
        let json_output = json!({
            "tid": tid.to_string(),
            "to": target,
            "moved": true,
            "migration": report.id.0,
            "bytes": report.image_bytes,
            "frozen_us": report.frozen_time.0,
            "by": report.engine.to_string(),
        });
        Outcome::with_json(report_text(tid, target, report), json_output, false)
    }

    fn failure_outcome(&self, error: &MigrateError) -> Outcome {
        let (tid, target) = (self.tid, &self.target);
        // `None` if the migration was refused before its first step.
        let step = match error {
            MigrateError::Failed(error) => Some(error.step.to_string()),
            MigrateError::Refused(_) => None,
        };
        let json_output = json!({
            "tid": tid.to_string(),
            "to": target,
            "moved": false,
            "step": step,
            "reason": error.to_string(),
        });
        let line = match error {
            // The virtual machine and the task have ended. The host on which the task ran last is
            // unknown.
            MigrateError::Refused(Error {
                code: PvmError::SysErr,
                reason,
            }) => {
                format!("the virtual machine ended before {tid} was on {target}: {reason}")
            }
            _ => format!("{tid} was not migrated to {target}: {error}"),
        };
        Outcome {
            json_values: vec![json_output],
            ..Outcome::from_error(line)
        }
    }
}

fn report_text(tid: Tid, target: &str, report: &MigrationReport) -> String {
    let frozen_ms = (report.frozen_time.0 + 500) / 1000;
    match report.engine {
        Engine::Criu => format!(
            "{tid} migrated to {target}: {} bytes, frozen {frozen_ms} ms\n",
            report.image_bytes
        ),
        engine => format!("{tid} migrated to {target} by {engine}: interrupted {frozen_ms} ms\n"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_is_one_line() {
        let id = sempa_proto::MigrationId(1);
        let report = MigrationReport {
            id,
            image_bytes: 1234,
            frozen_time: Micros(98_400),
            engine: Engine::Criu,
        };
        assert_eq!(
            report_text(Tid::from_raw(0x40002), "h3", &report),
            "t40002 migrated to h3: 1234 bytes, frozen 98 ms\n"
        );
        let report = MigrationReport {
            image_bytes: 0,
            engine: Engine::Restart { timeout_s: 5 },
            ..report
        };
        assert_eq!(
            report_text(Tid::from_raw(0x40002), "h3", &report),
            "t40002 migrated to h3 by restart: interrupted 98 ms\n"
        );
    }
}
