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

/// Spawns a task until one is placed on one of these hosts; others are ended.
fn spawned_on(vm: &Vm, hosts: &[&str]) -> String {
    let attempt = || -> anyhow::Result<String> {
        let tid = vm.spawn(&["busy"])?;
        let host = vm.host_of(&tid)?;
        if !hosts.contains(&host.as_str()) {
            vm.pvm(&["kill", &tid])?;
            anyhow::bail!("{tid} was placed on {host}");
        }
        Ok(tid)
    };
    eventually(SOON, || attempt().map_err(|error| format!("{error:#}")))
        .unwrap_or_else(|error| panic!("{error:#}\n{}", vm.logs()))
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
    // Until its first sample has come a host counts as a whole one, and what starts there counts as load for a moment: but
    // by and by there is a third of a processor for each, and not a sixteenth.
    let one = spawned_on(&vm, &["h1", "h2"]);
    let other = if places(&vm, std::slice::from_ref(&one)) == ["h1"] { "h2" } else { "h1" };
    let tids = [one, spawned_on(&vm, &[other])];
    groups[2].set(0.6).expect("the kernel takes it");
    let for_load = |kind: &EventKind| matches!(kind, EventKind::Moved { cause: Cause::Load { .. }, .. });
    let moved = vm
        .event(BY_AND_BY, "a move for the sake of the load", |entry| for_load(&entry.kind))
        .unwrap_or_else(|error| panic!("{error:#}\n{}", vm.logs()));
    let EventKind::Moved { tid, .. } = moved.kind else { unreachable!("just looked") };
    assert!(tids.contains(&tid.to_string()), "{tid} of {tids:?}");
    let now = places(&vm, &tids);
    assert_eq!(
        now.iter().filter(|host| *host == "h3").count(),
        1,
        "a second one would get no more than it has: {now:?}"
    );
    let there: Vec<_> = bed.host(3).processes().into_iter().filter(|(_, line)| line.contains("busy")).collect();
    assert_eq!(there.len(), 1, "{there:?}");
    assert!(groups[2].holds(there[0].0).expect("the group's file"), "the limit of its new host counts for it");
    vm.halt().expect("halts");
    drop(vm);
    drop(bed);
    drop(groups);
}
