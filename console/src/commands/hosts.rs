//! `hosts`: shows the state of every host.

use crate::arguments::require_no_args;
use crate::command::{CommandSpec, ParsedCommand, VmCommand};
use crate::outcome::Outcome;
use crate::output::time::format_local;
use crate::session::Session;
use crate::virtual_machine::{VirtualMachine, describe_host};
use libpvm::Error;
use sempa_proto::owner::{EvictionMode, GuestAccess};
use sempa_proto::rm::{HostState, RmQuery, RmReply};
use sempa_proto::table::{HostEntry, HostReport, HostUsage};
use serde_json::{Value, json};

const GIB: f64 = (1u64 << 30) as f64;

pub(crate) const SPEC: CommandSpec = CommandSpec {
    name: "hosts",
    summary: "Show load, memory, owner, tasks and version of each host",
    detail: "Syntax:  hosts\n\
             Output fields:\n  \
             HOST      name of the host\n  \
             DTID      tid of its daemon\n  \
             TASKS     spawned tasks there; in parentheses those that are paused or suspended\n  \
             LOAD      runnable processes in the last minute, of as many processors\n  \
             FREE GIB  memory that programs can still get, of all memory\n  \
             DRAINED   'yes' if a drain was requested; '-' without a resource manager\n  \
             VERSION   version of its daemon\n  \
             LEASE     silence after which the host is lost\n  \
             OWNER     what the owner allows at present\n",
    parse: |args| require_no_args("hosts", args, ParsedCommand::vm_command(HostsCommand)),
    ..CommandSpec::DEFAULT
};

#[derive(Debug)]
struct HostsCommand;

/// A host with its state.
struct DescribedHost {
    entry: HostEntry,
    /// The report of the host's daemon, or the reason why there is none.
    report: Result<HostReport, String>,
    /// True if the resource manager drains the host; `None` if no resource manager answers.
    is_drained: Option<bool>,
}

impl VmCommand for HostsCommand {
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        let table = session.vm.hosts()?;
        // Without a resource manager no host is drained, so the first failed question is the last.
        let mut rm_answers = true;
        let mut is_drained = |name: &str| {
            let is_drained = rm_answers.then(|| is_drained(&session.vm, name)).flatten();
            rm_answers = is_drained.is_some();
            is_drained
        };
        let hosts: Vec<DescribedHost> = table
            .hosts
            .into_iter()
            .map(|entry| DescribedHost {
                report: describe_host(&session.vm, entry.id, false)
                    .map_err(|error| error.to_string()),
                is_drained: is_drained(&entry.name),
                entry,
            })
            .collect();
        let failed = hosts.iter().any(|host| host.report.is_err());
        let mut outcome = Outcome::with_json(table_text(&hosts), table_json(&hosts), failed);
        let missing_reports = hosts
            .iter()
            .filter_map(|host| Some((&host.entry.name, host.report.as_ref().err()?)));
        outcome.errors.extend(
            missing_reports.map(|(name, reason)| format!("hosts: {name} gave no report: {reason}")),
        );
        Ok(outcome)
    }
}

/// True if the resource manager drains the host; `None` if no resource manager answers.
fn is_drained(machine: &dyn VirtualMachine, host: &str) -> Option<bool> {
    match machine.ask_rm(&RmQuery::HostDecisions(host.to_string())) {
        Ok(RmReply::Decisions {
            host_state:
                Some(HostState::Excluded {
                    drain_requested_by, ..
                }),
            ..
        }) => Some(drain_requested_by.is_some()),
        Ok(_) => Some(false),
        Err(_) => None,
    }
}

fn table_text(hosts: &[DescribedHost]) -> String {
    let name_width = hosts.iter().map(|host| host.entry.name.len()).max();
    let width = name_width.unwrap_or(0).max(4);
    let mut out = format!(
        "{:<width$} {:>8} {:>8} {:>10} {:>13} {:>7} {:>8} {:>6}  OWNER\n",
        "HOST", "DTID", "TASKS", "LOAD", "FREE GIB", "DRAINED", "VERSION", "LEASE"
    );
    for host in hosts {
        let (name, dtid) = (&host.entry.name, host.entry.id.tid());
        let drained = host.is_drained.map_or("-", |is_drained| match is_drained {
            true => "yes",
            false => "no",
        });
        out += &match &host.report {
            Ok(report) => format!(
                "{name:<width$} {dtid:>8x} {:>8} {:>10} {:>13} {drained:>7} {:>8} {:>6}  {}\n",
                task_count_text(report),
                usage_text(report.usage, |usage| format!(
                    "{:.2}/{}",
                    f64::from(usage.load_hundredths) / 100.0,
                    usage.processor_count
                )),
                usage_text(report.usage, |usage| format!(
                    "{:.1}/{:.1}",
                    usage.available_bytes as f64 / GIB,
                    usage.total_bytes as f64 / GIB
                )),
                report.version,
                format!("{:.1} s", report.lease.0 as f64 / 1e6),
                owner_text(report)
            ),
            Err(_) => format!(
                "{name:<width$} {dtid:>8x} {:>8} {:>10} {:>13} {drained:>7} {:>8} {:>6}  no report\n",
                "-", "-", "-", "-", "-"
            ),
        };
    }
    out
}

fn task_count_text(report: &HostReport) -> String {
    match report.stopped_task_count {
        0 => report.task_count.to_string(),
        stopped_count => format!("{} ({stopped_count})", report.task_count),
    }
}

fn usage_text(usage: Option<HostUsage>, format_usage: impl Fn(HostUsage) -> String) -> String {
    usage.map_or_else(|| "-".to_string(), format_usage)
}

fn owner_text(report: &HostReport) -> String {
    match report.guest_access {
        GuestAccess::Welcome => "guests are welcome".to_string(),
        GuestAccess::Paused { evict_at, eviction } => {
            let end = evict_at.map(|at| match eviction {
                EvictionMode::Kill => format!("; they are ended at {}", format_local(at)),
                EvictionMode::Move | EvictionMode::Checkpoint => {
                    format!("; they leave at {} if they can", format_local(at))
                }
            });
            format!(
                "guests are stopped: {}{}",
                report.access_reason,
                end.unwrap_or_default()
            )
        }
    }
}

fn table_json(hosts: &[DescribedHost]) -> Value {
    json!({ "hosts": hosts.iter().map(host_json).collect::<Vec<_>>() })
}

/// Returns the state of a host. Its report is `null` if its daemon did not answer.
fn host_json(host: &DescribedHost) -> Value {
    let report = host.report.as_ref().ok().map(|report| {
        let (evict_at, eviction) = match report.guest_access {
            GuestAccess::Welcome => (None, None),
            GuestAccess::Paused { evict_at, eviction } => (evict_at, Some(eviction.to_string())),
        };
        json!({
            "version": report.version,
            "lease_us": report.lease.0,
            "tasks": report.task_count,
            "stopped_tasks": report.stopped_task_count,
            "guests_welcome": report.guest_access == GuestAccess::Welcome,
            "owner_reason": report.access_reason,
            "evict_at_us": evict_at.map(|at| at.0),
            "eviction": eviction,
            "load": report.usage.map(|usage| f64::from(usage.load_hundredths) / 100.0),
            "processors": report.usage.map(|usage| usage.processor_count),
            "memory_available_bytes": report.usage.map(|usage| usage.available_bytes),
            "memory_total_bytes": report.usage.map(|usage| usage.total_bytes),
        })
    });
    json!({
        "name": host.entry.name,
        "dtid": host.entry.id.tid().to_string(),
        "drained": host.is_drained,
        "report": report,
        "error": host.report.as_ref().err(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures;
    use sempa_proto::Micros;

    fn described_host(access: GuestAccess, is_drained: Option<bool>) -> DescribedHost {
        DescribedHost {
            entry: fixtures::host(2, "ha2"),
            report: Ok(HostReport {
                version: "0.1.0".into(),
                lease: Micros(1_200_000),
                task_count: 3,
                stopped_task_count: u32::from(access != GuestAccess::Welcome) * 3,
                guest_access: access,
                access_reason: match access {
                    GuestAccess::Welcome => String::new(),
                    GuestAccess::Paused { .. } => "olga is logged in on pts/1".into(),
                },
                usage: Some(HostUsage {
                    load_hundredths: 152,
                    processor_count: 2,
                    available_bytes: 3 << 30,
                    total_bytes: 8 << 30,
                }),
                task_usages: Vec::new(),
                departures: Vec::new(),
                service_obstacle: None,
            }),
            is_drained,
        }
    }

    #[test]
    fn hosts_have_one_line_each() {
        let paused_access = GuestAccess::Paused {
            evict_at: None,
            eviction: EvictionMode::Move,
        };
        let silent_host = DescribedHost {
            entry: fixtures::host(3, "ha3"),
            report: Err("the host left the virtual machine".into()),
            is_drained: None,
        };
        let hosts = [
            described_host(GuestAccess::Welcome, Some(false)),
            described_host(paused_access, Some(true)),
            silent_host,
        ];
        let expected = "\
HOST     DTID    TASKS       LOAD      FREE GIB DRAINED  VERSION  LEASE  OWNER
ha2     80000        3     1.52/2       3.0/8.0      no    0.1.0  1.2 s  guests are welcome
ha2     80000    3 (3)     1.52/2       3.0/8.0     yes    0.1.0  1.2 s  guests are stopped: olga is logged in on pts/1
ha3     c0000        -          -             -       -        -      -  no report
";
        assert_eq!(table_text(&hosts), expected);
    }

    #[test]
    fn hosts_become_json() {
        let evicting_access = GuestAccess::Paused {
            evict_at: Some(Micros(7)),
            eviction: EvictionMode::Kill,
        };
        let value = host_json(&described_host(evicting_access, None));
        let report = &value["report"];
        assert_eq!(value["drained"], Value::Null);
        assert_eq!(
            (&report["evict_at_us"], &report["eviction"]),
            (&json!(7), &json!("kill"))
        );
        assert_eq!(report["guests_welcome"], false);
        assert_eq!(report["load"], 1.52);
    }
}
