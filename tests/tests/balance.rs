//! Hosts that are unequal, because control groups leave them different shares of the processors: the resource manager sees it,
//! and puts tasks, and moves them, where they get more.

use sempa_proto::event::EventKind;
use sempa_proto::migration::Cause;
use sempa_tests::limits::{self, Limit};
use sempa_tests::needs::testbed;
use sempa_tests::vm::Settings;
use sempa_tests::{Vm, eventually};
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);
/// A task rests for 20 s before it is moved for the sake of the load, and then it is looked at every 10 s.
const BY_AND_BY: Duration = Duration::from_secs(180);

/// Waits until as many hosts as there are have told of their load.
fn watchers(vm: &Vm, hosts: usize) {
    eventually(SOON, || {
        let tasks = vm.tasks().map_err(|error| format!("{error:#}"))?;
        let watchers = tasks.iter().filter(|task| task.name.ends_with("pvm-load-watcher")).count();
        if watchers == hosts { Ok(()) } else { Err(format!("{watchers} watchers: {tasks:?}\n{}", vm.logs())) }
    })
    .expect("a load watcher on every host");
}

fn places(vm: &Vm, tids: &[String]) -> Vec<String> {
    tids.iter().map(|tid| vm.host_of(tid).unwrap_or_else(|error| panic!("{error:#}\n{}", vm.logs()))).collect()
}

#[test]
fn tasks_go_where_limits_leave_more_and_leave_when_another_host_gets_more() {
    if let Some(lack) = limits::lacks() {
        return eprintln!("skipped: {lack}");
    }
    // Removed when the hosts are gone.
    let mut groups = Vec::new();
    let Some((bed, _)) = testbed(3) else { return };
    for (host, share) in bed.hosts().iter().zip([0.3, 0.3, 0.06]) {
        groups.push(Limit::new(host, share).expect("a group"));
    }
    let rm = Some("pvm-rm --policy load --balance".to_string());
    let vm = Vm::start(&bed, Settings { rm, ..Settings::default() }).expect("a virtual machine");
    vm.add(&["h2", "h3"]).expect("the others join");
    watchers(&vm, 3);
    vm.program("busy").expect("gcc");
    let tids: Vec<String> = (0..2).map(|_| vm.spawn(&["busy"]).expect("spawned")).collect();
    let mut first = places(&vm, &tids);
    first.sort();
    assert_eq!(first, ["h1", "h2"], "a third of a processor for each, and not a sixteenth");
    groups[2].set(0.9).expect("the kernel takes it");
    eventually(BY_AND_BY, || {
        let now = places(&vm, &tids);
        if now.iter().all(|host| host == "h3") { Ok(()) } else { Err(format!("{now:?}\n{}", vm.logs())) }
    })
    .expect("both go where each gets half a processor");
    for tid in &tids {
        let is_it = |kind: &EventKind| match kind {
            EventKind::Moved { tid: moved, cause, .. } => {
                moved.to_string() == *tid && matches!(cause, Cause::Load { .. })
            }
            _ => false,
        };
        vm.event(SOON, "a move for the sake of the load", |entry| is_it(&entry.kind))
            .unwrap_or_else(|error| panic!("{error:#}\n{}", vm.logs()));
    }
    vm.halt().expect("halts");
    drop(vm);
    drop(bed);
    drop(groups);
}
