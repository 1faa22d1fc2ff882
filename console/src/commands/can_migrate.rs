//! `can-migrate`: shows which hosts would accept a task.

use crate::arguments::parse_task_tid;
use crate::command::{CommandSpec, Completion, ParsedCommand, VmCommand, WordKind};
use crate::outcome::Outcome;
use crate::output::tables::host_name;
use crate::parse_error::ParseError;
use crate::service_notes;
use crate::session::Session;
use libpvm::Error;
use sempa_proto::engine::Engine;
use sempa_proto::migration::{MigrationTargets, Verdict};
use sempa_proto::table::HostTable;
use sempa_proto::{HostId, Tid};
use serde_json::{Value, json};

pub(crate) const SPEC: CommandSpec = CommandSpec {
    name: "can-migrate",
    summary: "List the hosts that accept a running task, and why the others refuse it",
    detail: "Syntax:  can-migrate tid [ host ]\n\
             Asks all hosts, or only this one. The task is neither migrated nor paused.\n\
             The hosts are listed by distance. A migration asks again, because the answer may change.\n\
             If the task would not migrate by CRIU, the engine is shown: its own checkpoint, or restart (SEMPA_ENGINE).\n",
    parse: |args| parse(args).map(ParsedCommand::vm_command),
    completion: Completion::WordDependent(|args, _| match args {
        [] => (0, WordKind::Tid),
        [_] => (0, WordKind::Host),
        _ => (0, WordKind::Unknown),
    }),
    ..CommandSpec::DEFAULT
};

#[derive(Debug)]
struct CanMigrateCommand {
    tid: Tid,
    /// Name of the only host to query. `None` queries all hosts.
    target: Option<String>,
}

fn parse(args: &[String]) -> Result<CanMigrateCommand, ParseError> {
    let (tid, target) = match args {
        [tid] => (tid, None),
        [tid, host] => (tid, Some(host.clone())),
        _ => return Err(ParseError::WrongArgs(SPEC.name)),
    };
    let tid = parse_task_tid(SPEC.name, tid)?;
    Ok(CanMigrateCommand { tid, target })
}

impl VmCommand for CanMigrateCommand {
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        let table = session.vm.hosts()?;
        let mut hosts = table.hosts.clone();
        let mut outcome = match session.vm.can_migrate(self.tid, self.target.as_deref()) {
            Ok(targets) => {
                let is_asked = |id: HostId| targets.verdicts.iter().any(|(host, _)| *host == id);
                hosts.retain(|host| host.id == targets.from || is_asked(host.id));
                Outcome::with_json(
                    targets_text(&table, &targets),
                    targets_json(&table, &targets),
                    targets.nearest_host().is_none(),
                )
            }
            Err(error) => Outcome::from_error(format!("{}: {error}", SPEC.name)),
        };
        outcome
            .errors
            .extend(service_notes::lines(&session.vm, &hosts));
        Ok(outcome)
    }
}

fn targets_text(table: &HostTable, targets: &MigrationTargets) -> String {
    let name_of = |host: HostId| host_name(table, host);
    let width = targets
        .verdicts
        .iter()
        .map(|(host, _)| name_of(*host).len())
        .max()
        .unwrap_or(0);
    let mut out = format!(
        "{} is on {}, {} KiB\n",
        targets.tid,
        name_of(targets.from),
        targets.memory_bytes.div_ceil(1024)
    );
    for (host, verdict) in &targets.verdicts {
        let engine = targets.engine(*host);
        let host = name_of(*host);
        match verdict.split_first() {
            None if engine == Engine::Criu => out += &format!("{host:width$}  yes\n"),
            None => out += &format!("{host:width$}  yes, by {engine}\n"),
            Some((first_refusal, other_refusals)) => {
                out += &format!("{host:width$}  no: {first_refusal}\n");
                other_refusals
                    .iter()
                    .for_each(|refusal| out += &format!("{:width$}      {refusal}\n", ""));
            }
        }
    }
    out + &match targets.nearest_host() {
        Some(host) => format!("nearest host that accepts it: {}\n", name_of(host)),
        None if targets.verdicts.is_empty() => "no other host was asked\n".to_string(),
        None => "no host accepts it\n".to_string(),
    }
}

/// Returns as JSON: the task's host and memory, the verdict of each host, and the nearest host that
/// accepts the task. The refusals are given as text and as records.
fn targets_json(table: &HostTable, targets: &MigrationTargets) -> Value {
    let name_of = |host: HostId| table.get(host).map(|entry| entry.name.clone());
    let host_json = |(host, verdict): &(HostId, Verdict)| {
        let reasons: Vec<String> = verdict.iter().map(ToString::to_string).collect();
        let engine = verdict
            .is_empty()
            .then(|| targets.engine(*host).to_string());
        json!({
            "host": name_of(*host),
            "takes": verdict.is_empty(),
            "by": engine,
            "reasons": reasons,
            "refusals": verdict,
        })
    };
    json!({
        "tid": targets.tid.to_string(),
        "host": name_of(targets.from),
        "resident_bytes": targets.memory_bytes,
        "hosts": targets.verdicts.iter().map(host_json).collect::<Vec<_>>(),
        "nearest": targets.nearest_host().and_then(name_of),
    })
}
