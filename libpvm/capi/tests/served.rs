//! Tests of taskers, hosters and resource managers that do not belong to Sempa: small C programs
//! serve a real virtual machine with the documented messages, and the daemon resumes these services
//! when the programs die.

mod common;

use common::vm::Vm;
use common::{Program, include};

fn served() -> Program {
    Program::compile("served", &include())
}

/// A registered tasker starts the tasks of its host; after the death of the tasker the daemon
/// starts them.
#[test]
#[ignore = "system tier: needs gcc"]
fn daemon_starts_tasks_after_the_tasker_dies() {
    let (vm, program) = (Vm::start(), served());
    let mut tasker = vm.play(&program, &["tasker"]);
    tasker.until("serving");
    let said = vm.play(&program, &["spawner", "5"]).ends_well();
    assert_eq!(said.matches("by tasker on 40000").count(), 5, "{said}");
    let mut watcher = vm.play(&program, &["watcher"]);
    watcher.until("watching");
    tasker.kill();
    watcher.until("told");
    watcher.ends_well();
    let said = vm.play(&program, &["spawner", "2"]).ends_well();
    assert_eq!(said.matches("by daemon").count(), 2, "{said}");
}

/// A registered hoster starts daemons; after the death of the hoster during a request the master
/// starts them.
#[test]
#[ignore = "system tier: needs gcc"]
fn master_starts_daemons_after_the_hoster_dies() {
    let (vm, program) = (Vm::start(), served());
    let mut hoster = vm.play(&program, &["hoster"]);
    hoster.until("serving");
    let said = vm
        .play(&program, &["add", "h2", "refused", "h3 so=ms"])
        .ends_well();
    assert!(
        said.contains("added 2\nh2 524288\nrefused -28\nh3 so=ms 1048576\n"),
        "{said}"
    );
    hoster.until("order h3 so=ms");
    hoster.kill();
    let said = vm.play(&program, &["add", "h4 so=ms", "h5"]).ends_well();
    assert!(
        said.contains("added 1\nh4 so=ms -29\nh5 "),
        "without a hoster a person would have to be asked: {said}"
    );
    let mut deaf = vm.play(&program, &["hoster", "silent"]);
    deaf.until("serving");
    let adding = vm.play(&program, &["add", "h6"]);
    deaf.until("heard");
    deaf.kill();
    assert!(adding.ends_well().contains("added 1\n"));
    let said = vm.play_on("h2", &program, &["register"]).ends_well();
    assert_eq!(
        said, "hoster -34 tasker 0\n",
        "a hoster is for the master's host, a tasker for each"
    );
}

/// Only one task at a time can serve, and it can release the service.
#[test]
#[ignore = "system tier: needs gcc"]
fn service_has_one_task_and_can_be_released() {
    let (vm, program) = (Vm::start(), served());
    vm.play(&program, &["twice"]).ends_well();
    let mut tasker = vm.play(&program, &["tasker"]);
    tasker.until("serving");
    assert_eq!(
        vm.play(&program, &["register"]).ends_well(),
        "hoster 0 tasker -30\n"
    );
}

/// Each host may have its own resource manager, and a resource manager may refuse the registration
/// of another.
#[test]
#[ignore = "system tier: needs gcc"]
fn each_host_may_have_its_own_rm() {
    let (vm, program) = (Vm::start(), served());
    vm.play(&program, &["add", "h2"]).ends_well();
    let mut first = vm.play(&program, &["manager", "40000"]);
    first.until("before 0 master 40000\nserving");
    let mut second = vm.play_on("h2", &program, &["manager", "80000"]);
    second.until("before 0 master 40000\nserving");
    for (host, tid) in [("master", "40000"), ("h2", "80000")] {
        let said = vm.play_on(host, &program, &["spawner", "3"]).ends_well();
        assert_eq!(said.matches(&format!("on {tid}")).count(), 3, "{said}");
    }
    assert_eq!(
        vm.play(&program, &["deposed"]).ends_well(),
        "-8\n",
        "the one that is there refuses"
    );
    second.kill();
    first.kill();
    let said = vm.play(&program, &["spawner", "2"]).ends_well();
    assert_eq!(said.matches("by daemon").count(), 2, "{said}");
}

/// A tasker named in the environment is started with each daemon.
#[test]
#[ignore = "system tier: needs gcc"]
fn environment_names_the_tasker_of_each_daemon() {
    let program = served();
    let vm = Vm::start_with(&[("PVM_TASKER", format!("{} tasker", program.path().display()))]);
    vm.play(&program, &["add", "h2"]).ends_well();
    let begin = std::time::Instant::now();
    loop {
        let said = vm.play(&program, &["spawner", "4"]).ends_well();
        if ["40000", "80000"]
            .iter()
            .all(|host| said.contains(&format!("by tasker on {host}")))
        {
            return;
        }
        assert!(
            begin.elapsed() < common::vm::DEADLINE,
            "the taskers do not serve: {said}"
        );
    }
}
