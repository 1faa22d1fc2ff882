//! `conf`: shows the host table.

use crate::arguments::require_no_args;
use crate::command::{CommandSpec, ParsedCommand, VmCommand};
use crate::outcome::Outcome;
use crate::output::json;
use crate::output::tables::plural_ending;
use crate::service_notes;
use crate::session::Session;
use libpvm::Error;
use sempa_proto::table::HostTable;
use serde_json::{Value, json};

pub(crate) const SPEC: CommandSpec = CommandSpec {
    name: "conf",
    summary: "List the hosts of the virtual machine",
    detail: "Syntax:  conf\n\
             Output fields:\n  \
             HOST    name of the host\n  \
             DTID    its tid\n  \
             ARCH    its architecture\n  \
             SPEED   its relative speed, as given when it was added\n  \
             DSIG    its data format\n\
             On standard error: hosts where the tasks of an ordinary user cannot migrate, for lack of the service pvm-taskerd.\n",
    parse: |args| require_no_args("conf", args, ParsedCommand::vm_command(ConfCommand)),
    ..CommandSpec::DEFAULT
};

#[derive(Debug)]
struct ConfCommand;

impl VmCommand for ConfCommand {
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        let table = session.vm.hosts()?;
        Ok(Outcome {
            // Programs that read the table expect PVM's lines on standard output.
            errors: service_notes::lines(&session.vm, &table.hosts),
            ..Outcome::with_json(table_text(&table), table_json(&table), false)
        })
    }
}

fn table_text(table: &HostTable) -> String {
    let (host_count, format_count) = (table.hosts.len(), table.data_format_count());
    let mut out = format!(
        "{host_count} host{}, {format_count} data format{}\n",
        plural_ending(host_count),
        plural_ending(format_count)
    );
    out += &format!(
        "{:>24} {:>8} {:>8}{:>8}       DSIG\n",
        "HOST", "DTID", "ARCH", "SPEED"
    );
    for host in &table.hosts {
        out += &format!(
            "{:>24} {:>8x} {:>8}{:>8} 0x{:08x}\n",
            host.name,
            host.id.tid(),
            host.arch,
            host.speed,
            host.dsig
        );
    }
    out
}

fn table_json(table: &HostTable) -> Value {
    json!({
        "epoch": table.epoch.0,
        "formats": table.data_format_count(),
        "hosts": table.hosts.iter().map(json::host).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::table;

    #[test]
    fn conf_layout_matches_pvm() {
        let expected = "\
3 hosts, 1 data format
                    HOST     DTID     ARCH   SPEED       DSIG
                     ha1    40000  LINUX64    1000 0x00408c41
                     ha2    80000  LINUX64    1000 0x00408c41
                     ha3    c0000  LINUX64    1000 0x00408c41
";
        assert_eq!(table_text(&table()), expected);
        let mut one_host_table = table();
        one_host_table.hosts.truncate(1);
        one_host_table.hosts[0].dsig = 1;
        assert!(table_text(&one_host_table).starts_with("1 host, 1 data format\n"));
    }

    #[test]
    fn host_table_becomes_json() {
        let table_value = table_json(&table());
        assert_eq!(table_value["hosts"][1]["name"], "ha2");
        assert_eq!(table_value["hosts"][1]["dtid"], "t80000");
    }
}
