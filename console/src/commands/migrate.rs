//! `migrate`: migrates a task to a host.

use crate::arguments::parse_task_tid;
use crate::command::{CommandSpec, Completion, ParsedCommand, VmCommand, WordKind};
use crate::outcome::Outcome;
use crate::parse_error::ParseError;
use crate::session::Session;
use libpvm::{Error, MigrateError};
use sempa_proto::engine::Engine;
use sempa_proto::task::MigrationReport;
use sempa_proto::{PvmError, Tid};
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
        Ok(match session.vm.migrate_and_wait(self.tid, &self.target) {
            Ok(report) => self.success_outcome(&report),
            Err(error) => self.failure_outcome(&error),
        })
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
    use sempa_proto::Micros;

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
