//! Builds the values that commands print with `--json`, one per line.
//!
//! Tids are written as `t40001`, times in microseconds since the Unix epoch.

use crate::format::HostNames;
use sempa_proto::event::Event;
use sempa_proto::migration::{MigrationTargets, Verdict};
use sempa_proto::table::{AddedHost, HostEntry, HostTable, TaskInfo};
use sempa_proto::task::{MailboxClass, MigrationReport};
use sempa_proto::{HostId, PvmError, Tid};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

fn error(error: PvmError) -> Value {
    json!({ "code": error.code(), "text": error.text() })
}

fn host(entry: &HostEntry) -> Value {
    json!({
        "name": entry.name,
        "index": entry.id.index(),
        "dtid": entry.id.tid().to_string(),
        "arch": entry.arch,
        "speed": entry.speed,
        "dsig": entry.dsig,
        "addresses": entry.addresses,
    })
}

/// Returns the value of `conf`.
pub(crate) fn conf(table: &HostTable) -> Value {
    json!({
        "epoch": table.epoch.0,
        "formats": table.data_format_count(),
        "hosts": table.hosts.iter().map(host).collect::<Vec<_>>(),
    })
}

/// Combines one value per requested item.
pub(crate) fn results(values: Vec<Value>) -> Value {
    json!({ "results": values })
}

/// Returns one item of `mstat` or `pstat`, with its name under the given key.
pub(crate) fn status(key: &str, name: &str, status: Result<(), PvmError>) -> Value {
    match status {
        Ok(()) => json!({ key: name, "up": true }),
        Err(code) => json!({ key: name, "up": false, "error": error(code) }),
    }
}

/// Returns one task of `kill` or `sig`.
pub(crate) fn signal_result(tid: Tid, why_not: Option<&str>) -> Value {
    match why_not {
        None => json!({ "tid": tid.to_string(), "sent": true }),
        Some(reason) => json!({ "tid": tid.to_string(), "sent": false, "reason": reason }),
    }
}

/// Returns the value of `alias` without arguments.
pub(crate) fn aliases(aliases: &BTreeMap<String, Vec<String>>) -> Value {
    json!({ "aliases": aliases })
}

/// Returns the value of `getopt`.
pub(crate) fn options(options: &[(&str, i32)]) -> Value {
    let options: Map<String, Value> = options
        .iter()
        .map(|(name, value)| (name.to_string(), json!(value)))
        .collect();
    json!({ "options": options })
}

/// Returns the value of `setopt`.
pub(crate) fn option_set(name: &str, old: i32, new: i32) -> Value {
    json!({ "option": name, "old": old, "new": new })
}

/// Returns the value of `id`.
pub(crate) fn id(tid: Tid) -> Value {
    json!({ "tid": tid.to_string() })
}

/// Returns one job of `jobs`.
pub(crate) fn job(number: u32, traced: bool, tids: &[Tid]) -> Value {
    json!({ "number": number, "traced": traced, "tids": tids.iter().map(Tid::to_string).collect::<Vec<_>>() })
}

/// Returns the value of `jobs`.
pub(crate) fn jobs(jobs: Vec<Value>) -> Value {
    json!({ "jobs": jobs })
}

/// Returns the value of `names`.
pub(crate) fn names(classes: &[MailboxClass]) -> Value {
    let entry = |(index, owner, flags): &(i32, Tid, i32)| json!({ "index": index, "owner": owner.is_task().then(|| owner.to_string()), "flags": flags });
    let class = |class: &MailboxClass| json!({ "name": class.name, "entries": class.entries.iter().map(entry).collect::<Vec<_>>() });
    json!({ "classes": classes.iter().map(class).collect::<Vec<_>>() })
}

/// Returns the value of `export` without arguments.
pub(crate) fn exported(names: &[String]) -> Value {
    json!({ "exported": names })
}

/// Returns the value of `setenv` without a value.
pub(crate) fn variables<'a>(
    variables: impl IntoIterator<Item = (&'a String, &'a String)>,
) -> Value {
    let variables: Map<String, Value> = variables
        .into_iter()
        .map(|(name, value)| (name.clone(), json!(value)))
        .collect();
    json!({ "variables": variables })
}

/// Returns the value of `tickle`.
pub(crate) fn tickle(numbers: &[i32]) -> Value {
    json!({ "numbers": numbers })
}

/// Returns the value of `version`.
pub(crate) fn version(interface: &str) -> Value {
    json!({ "interface": interface, "sempa": env!("CARGO_PKG_VERSION") })
}

/// Returns the value of `ps`.
pub(crate) fn ps(table: &HostTable, tasks: &[TaskInfo]) -> Value {
    let task = |task: &TaskInfo| {
        json!({
            "tid": task.tid.to_string(),
            "parent": task.parent.is_task().then(|| task.parent.to_string()),
            "host": table.get(task.host).map(|host| host.name.clone()),
            "host_index": task.host.index(),
            "flags": task.flags,
            "name": task.name,
            "pid": task.pid,
            "uid": task.uid,
            "moving": task.migrating,
            "stopped": task.paused,
            "suspended": task.suspended,
        })
    };
    json!({ "tasks": tasks.iter().map(task).collect::<Vec<_>>() })
}

/// Returns the value of `add`.
pub(crate) fn added(lines: &[String], results: &[AddedHost]) -> Value {
    let one = |(line, added): (&String, &AddedHost)| match &added.result {
        Ok(entry) => json!({ "line": line, "host": host(entry) }),
        Err(code) => json!({ "line": line, "error": error(*code), "reason": added.reason }),
    };
    json!({ "results": lines.iter().zip(results).map(one).collect::<Vec<_>>() })
}

/// Returns the value of `delete`.
pub(crate) fn deleted(names: &[String], results: &[Result<(), PvmError>]) -> Value {
    let one = |(name, result): (&String, &Result<(), PvmError>)| match result {
        Ok(()) => json!({ "name": name, "deleted": true }),
        Err(code) => json!({ "name": name, "deleted": false, "error": error(*code) }),
    };
    json!({ "results": names.iter().zip(results).map(one).collect::<Vec<_>>() })
}

/// Returns the value of `spawn`. `job` is the job's number if output or records are collected.
pub(crate) fn spawned(job: Option<u32>, results: &[Result<Tid, PvmError>]) -> Value {
    let one = |result: &Result<Tid, PvmError>| match result {
        Ok(tid) => json!({ "tid": tid.to_string() }),
        Err(code) => json!({ "error": error(*code) }),
    };
    json!({ "job": job, "results": results.iter().map(one).collect::<Vec<_>>() })
}

/// Returns the value of `can-migrate`: the refusals of each host, as records and as text.
pub(crate) fn survey(table: &HostTable, survey: &MigrationTargets) -> Value {
    let name = |host: HostId| table.get(host).map(|entry| entry.name.clone());
    let one = |(host, verdict): &(HostId, Verdict)| {
        let reasons: Vec<String> = verdict.iter().map(ToString::to_string).collect();
        let engine = verdict.is_empty().then(|| survey.engine(*host).to_string());
        json!({
            "host": name(*host),
            "takes": verdict.is_empty(),
            "by": engine,
            "reasons": reasons,
            "refusals": verdict,
        })
    };
    json!({
        "tid": survey.tid.to_string(),
        "host": name(survey.from),
        "resident_bytes": survey.resident_bytes,
        "hosts": survey.verdicts.iter().map(one).collect::<Vec<_>>(),
        "nearest": survey.nearest().and_then(name),
    })
}

/// Returns the value of a successful `migrate`.
pub(crate) fn migrated(tid: Tid, to: &str, report: &MigrationReport) -> Value {
    json!({
        "tid": tid.to_string(),
        "to": to,
        "moved": true,
        "migration": report.id.0,
        "bytes": report.bytes,
        "frozen_us": report.frozen.0,
        "by": report.engine.to_string(),
    })
}

/// Returns the value of a failed `migrate`. `step` is the step that failed, if the migration had
/// begun.
pub(crate) fn not_migrated(tid: Tid, to: &str, step: Option<String>, reason: &str) -> Value {
    json!({ "tid": tid.to_string(), "to": to, "moved": false, "step": step, "reason": reason })
}

/// Returns the value of an event. `kind` is the event record in the virtual machine's own form.
pub(crate) fn event(names: &HostNames, event: &Event) -> Value {
    json!({
        "number": event.number,
        "at_us": event.at.0,
        "time": crate::format::time(event.at),
        "host": names.get(event.host),
        "host_index": event.host.index(),
        "text": event.kind.with_host_names(|host| names.get(host)),
        "kind": event.kind,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::tests::{host_names, table, task};
    use sempa_proto::event::EventKind;
    use sempa_proto::{HostId, Micros};

    /// Tables become JSON values.
    #[test]
    fn tables_become_json() {
        let conf = conf(&table());
        assert_eq!(conf["hosts"][1]["name"], "ha2");
        assert_eq!(conf["hosts"][1]["dtid"], "t80000");
        let ps = ps(
            &table(),
            &[
                task(0x40004, -35, 9, 6, "x"),
                task(0x80001, 0x40004, 9, 6, "y"),
            ],
        );
        assert_eq!(
            ps["tasks"][0]["parent"],
            Value::Null,
            "a parent that asked not to be known is none"
        );
        assert_eq!(ps["tasks"][1]["parent"], "t40004");
        assert_eq!(ps["tasks"][1]["host"], "ha2");
    }

    /// Failures have code, text and reason.
    #[test]
    fn failures_have_code_text_and_reason() {
        let failed = AddedHost {
            result: Err(PvmError::CantStart),
            reason: "ssh: no route".into(),
        };
        let added = added(&["h9".to_string()], &[failed]);
        assert_eq!(added["results"][0]["error"]["code"], -29);
        assert_eq!(added["results"][0]["reason"], "ssh: no route");
        assert_eq!(
            spawned(None, &[Err(PvmError::NoFile)])["results"][0]["error"]["text"],
            "No such file"
        );
    }

    /// An event has its text and its record.
    #[test]
    fn events_have_text_and_record() {
        let kind = EventKind::HostVacated {
            host: HostId::MASTER,
        };
        let value = event(
            &host_names(),
            &Event {
                number: 1,
                at: Micros(5),
                host: HostId::MASTER,
                kind,
            },
        );
        assert_eq!(value["host"], "ha1");
        assert_eq!(value["kind"]["HostClean"]["host"], 1);
        assert!(
            value["text"]
                .as_str()
                .is_some_and(|text| text.contains("clean"))
        );
    }
}
