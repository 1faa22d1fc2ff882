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
    parse: |args| parse(args).map(ParsedCommand::on_vm),
    completion: Completion::ByWords(|args, _| match args {
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
    to: String,
}

fn parse(args: &[String]) -> Result<MigrateCommand, ParseError> {
    match args {
        [tid, host] => Ok(MigrateCommand {
            tid: parse_task_tid("migrate", tid)?,
            to: host.clone(),
        }),
        _ => Err(ParseError::WrongArgs("migrate")),
    }
}

impl VmCommand for MigrateCommand {
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        Ok(match session.vm.migrate(self.tid, &self.to) {
            Ok(report) => self.success(&report),
            Err(error) => self.failure(&error),
        })
    }
}

impl MigrateCommand {
    fn success(&self, report: &MigrationReport) -> Outcome {
        let (tid, to) = (self.tid, &self.to);
        let value = json!({
            "tid": tid.to_string(),
            "to": to,
            "moved": true,
            "migration": report.id.0,
            "bytes": report.bytes,
            "frozen_us": report.frozen.0,
            "by": report.engine.to_string(),
        });
        Outcome::with_values(text(tid, to, report), value, false)
    }

    fn failure(&self, error: &MigrateError) -> Outcome {
        let (tid, to) = (self.tid, &self.to);
        // `None` if the migration had not begun.
        let step = match error {
            MigrateError::Failed(error) => Some(error.step.to_string()),
            MigrateError::Refused(_) => None,
        };
        let value = json!({
            "tid": tid.to_string(),
            "to": to,
            "moved": false,
            "step": step,
            "reason": error.to_string(),
        });
        let line = match error {
            // The virtual machine ended, and the task with it; on which host is unknown.
            MigrateError::Refused(Error {
                code: PvmError::SysErr,
                reason,
            }) => {
                format!("the virtual machine ended before {tid} was on {to}: {reason}")
            }
            _ => format!("{tid} was not migrated to {to}: {error}"),
        };
        Outcome {
            json: vec![value],
            ..Outcome::error(line)
        }
    }
}

fn text(tid: Tid, to: &str, report: &MigrationReport) -> String {
    let ms = (report.frozen.0 + 500) / 1000;
    match report.engine {
        Engine::Criu => format!(
            "{tid} migrated to {to}: {} bytes, frozen {ms} ms\n",
            report.bytes
        ),
        engine => format!("{tid} migrated to {to} by {engine}: interrupted {ms} ms\n"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sempa_proto::Micros;

    /// The report of a migration is one line.
    #[test]
    fn report_is_one_line() {
        let id = sempa_proto::MigrationId(1);
        let report = MigrationReport {
            id,
            bytes: 1234,
            frozen: Micros(98_400),
            engine: Engine::Criu,
        };
        assert_eq!(
            text(Tid::from_raw(0x40002), "h3", &report),
            "t40002 migrated to h3: 1234 bytes, frozen 98 ms\n"
        );
        let report = MigrationReport {
            bytes: 0,
            engine: Engine::Restart { timeout_s: 5 },
            ..report
        };
        assert_eq!(
            text(Tid::from_raw(0x40002), "h3", &report),
            "t40002 migrated to h3 by restart: interrupted 98 ms\n"
        );
    }
}
