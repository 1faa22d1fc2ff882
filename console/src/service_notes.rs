//! Lines that say on which hosts CRIU cannot migrate the user's tasks, because the tasker service
//! is missing there, and how the administrator adds it.

use crate::output::terminal::Terminal;
use crate::virtual_machine::{VirtualMachine, describe_host};
use libpvm::Vm;
use nix::unistd::geteuid;
use sempa_proto::table::{HostEntry, HostReport};
use sempa_proto::task::{Reply, Request};
use sempa_proto::tasker_service::ServiceObstacle;
use std::ops::ControlFlow;
use std::thread;
use std::time::{Duration, Instant};

/// Time limit for the hosts to describe themselves. A host that does not answer gets no line.
const REPORTS_TIMEOUT: Duration = Duration::from_secs(1);
/// Time limit for the tasker of a new daemon to report what it can do.
const TASKER_TIMEOUT: Duration = Duration::from_secs(2);
/// Interval for asking whether the tasker has reported.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Returns the lines about `hosts`: one for all hosts with the same obstacle. Asks no host if the
/// user is root, whose tasks need no service.
pub(crate) fn lines(machine: &dyn VirtualMachine, hosts: &[HostEntry]) -> Vec<String> {
    if geteuid().is_root() {
        return Vec::new();
    }
    let deadline = Instant::now() + REPORTS_TIMEOUT;
    let obstacles = hosts.iter().filter_map(|host| {
        let report = report_until(machine, host, deadline)?;
        Some((host.name.as_str(), report.service_obstacle?))
    });
    grouped_lines(obstacles)
}

/// Prints the lines about all hosts of a virtual machine that this process has just started.
pub(crate) fn show_at_start(vm: &Vm) {
    if geteuid().is_root() {
        return;
    }
    let deadline = Instant::now() + TASKER_TIMEOUT;
    while !is_tasker_known(vm) && Instant::now() < deadline {
        thread::sleep(POLL_INTERVAL);
    }
    let hosts = vm.config().map(|table| table.hosts).unwrap_or_default();
    for line in lines(vm, &hosts) {
        Terminal.print_error(&line);
    }
}

/// True if the local tasker has reported, or if it is known that it is not the service's.
fn is_tasker_known(vm: &Vm) -> bool {
    matches!(
        VirtualMachine::ask(vm, Request::QueryEngine),
        Ok(Reply::Engine(Some(_)))
    ) || describe_host(vm, vm.host(), false).is_ok_and(|report| report.service_obstacle.is_some())
}

/// Asks a host to describe itself, and waits until the deadline at most. `None` if the host has not
/// answered.
fn report_until(
    machine: &dyn VirtualMachine,
    host: &HostEntry,
    deadline: Instant,
) -> Option<HostReport> {
    let request = Request::DescribeHost {
        host: host.id.tid(),
        with_tasks: false,
    };
    let mut on_wait = || match Instant::now() < deadline {
        true => ControlFlow::Continue(()),
        false => ControlFlow::Break(()),
    };
    match machine.ask_while(request, &mut on_wait) {
        Ok(Some(Reply::HostReport(report))) => Some(*report),
        _ => None,
    }
}

fn grouped_lines<'a>(obstacles: impl Iterator<Item = (&'a str, ServiceObstacle)>) -> Vec<String> {
    let mut groups: Vec<(ServiceObstacle, Vec<&str>)> = Vec::new();
    for (host, obstacle) in obstacles {
        match groups.iter_mut().find(|(known, _)| *known == obstacle) {
            Some((_, hosts)) => hosts.push(host),
            None => groups.push((obstacle, vec![host])),
        }
    }
    let lines = groups.into_iter().map(|(obstacle, hosts)| {
        let hosts = hosts.join(", ");
        format!("tasks cannot be migrated by CRIU on {hosts}: {obstacle}")
    });
    lines.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Hosts with the same obstacle share a line, in the order of the host table.
    #[test]
    fn hosts_with_the_same_obstacle_share_a_line() {
        let other = ServiceObstacle::Unprivileged("CAP_SYS_ADMIN".into());
        let obstacles = [
            ("ha1", ServiceObstacle::NotRunning),
            ("ha2", other.clone()),
            ("ha3", ServiceObstacle::NotRunning),
        ];
        let expected = [
            format!(
                "tasks cannot be migrated by CRIU on ha1, ha3: {}",
                ServiceObstacle::NotRunning
            ),
            format!("tasks cannot be migrated by CRIU on ha2: {other}"),
        ];
        assert_eq!(grouped_lines(obstacles.into_iter()), expected);
        assert!(expected.iter().all(|line| !line.contains('\n')));
    }
}
