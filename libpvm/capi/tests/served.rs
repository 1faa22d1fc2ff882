//! Tests of taskers, hosters and resource managers that do not belong to Sempa: small C programs
//! serve a real virtual machine with the documented messages, and the daemon resumes these services
//! when the programs die.

mod common;

use common::vm::Vm;
use common::{Program, include};

fn serving_program() -> Program {
    Program::compile("served", &include())
}

/// A registered tasker starts the tasks of its host; after the death of the tasker the daemon
/// starts them.
#[test]
#[ignore = "system tier: needs gcc"]
fn daemon_starts_tasks_after_the_tasker_dies() {
    let (vm, program) = (Vm::start(), serving_program());
    let mut tasker = vm.run(&program, &["tasker"]);
    tasker.wait_for_output("serving");
    let said = vm.run(&program, &["spawner", "5"]).wait_for_success();
    assert_eq!(said.matches("by tasker on 40000").count(), 5, "{said}");
    let mut watcher = vm.run(&program, &["watcher"]);
    watcher.wait_for_output("watching");
    tasker.kill();
    watcher.wait_for_output("told");
    watcher.wait_for_success();
    let said = vm.run(&program, &["spawner", "2"]).wait_for_success();
    assert_eq!(said.matches("by daemon").count(), 2, "{said}");
}

/// A registered hoster starts daemons; after the death of the hoster during a request the master
/// starts them.
#[test]
#[ignore = "system tier: needs gcc"]
fn master_starts_daemons_after_the_hoster_dies() {
    let (vm, program) = (Vm::start(), serving_program());
    let mut hoster = vm.run(&program, &["hoster"]);
    hoster.wait_for_output("serving");
    let said = vm
        .run(&program, &["add", "h2", "refused", "h3 so=ms"])
        .wait_for_success();
    assert!(
        said.contains("added 2\nh2 524288\nrefused -28\nh3 so=ms 1048576\n"),
        "{said}"
    );
    hoster.wait_for_output("order h3 so=ms");
    hoster.kill();
    let said = vm
        .run(&program, &["add", "h4 so=ms", "h5"])
        .wait_for_success();
    assert!(
        said.contains("added 1\nh4 so=ms -29\nh5 "),
        "without a hoster a person would have to be asked: {said}"
    );
    let mut deaf = vm.run(&program, &["hoster", "silent"]);
    deaf.wait_for_output("serving");
    let adding = vm.run(&program, &["add", "h6"]);
    deaf.wait_for_output("heard");
    deaf.kill();
    assert!(adding.wait_for_success().contains("added 1\n"));
    let said = vm.run_on("h2", &program, &["register"]).wait_for_success();
    assert_eq!(
        said, "hoster -34 tasker 0\n",
        "a hoster is for the master's host, a tasker for each"
    );
}

/// Only one task at a time can serve, and it can release the service.
#[test]
#[ignore = "system tier: needs gcc"]
fn service_has_one_task_and_can_be_released() {
    let (vm, program) = (Vm::start(), serving_program());
    vm.run(&program, &["twice"]).wait_for_success();
    let mut tasker = vm.run(&program, &["tasker"]);
    tasker.wait_for_output("serving");
    assert_eq!(
        vm.run(&program, &["register"]).wait_for_success(),
        "hoster 0 tasker -30\n"
    );
}

/// Each host may have its own resource manager, and a resource manager may refuse the registration
/// of another.
#[test]
#[ignore = "system tier: needs gcc"]
fn each_host_may_have_its_own_rm() {
    let (vm, program) = (Vm::start(), serving_program());
    vm.run(&program, &["add", "h2"]).wait_for_success();
    let mut first = vm.run(&program, &["manager", "40000"]);
    first.wait_for_output("before 0 master 40000\nserving");
    let mut second = vm.run_on("h2", &program, &["manager", "80000"]);
    second.wait_for_output("before 0 master 40000\nserving");
    for (host, tid) in [("master", "40000"), ("h2", "80000")] {
        let said = vm
            .run_on(host, &program, &["spawner", "3"])
            .wait_for_success();
        assert_eq!(said.matches(&format!("on {tid}")).count(), 3, "{said}");
    }
    assert_eq!(
        vm.run(&program, &["deposed"]).wait_for_success(),
        "-8\n",
        "the one that is there refuses"
    );
    second.kill();
    first.kill();
    let said = vm.run(&program, &["spawner", "2"]).wait_for_success();
    assert_eq!(said.matches("by daemon").count(), 2, "{said}");
}

/// A tasker named in the environment is started with each daemon.
#[test]
#[ignore = "system tier: needs gcc"]
fn environment_names_the_tasker_of_each_daemon() {
    let program = serving_program();
    let vm = Vm::start_with(&[("PVM_TASKER", format!("{} tasker", program.path().display()))]);
    vm.run(&program, &["add", "h2"]).wait_for_success();
    let begin = std::time::Instant::now();
    loop {
        let said = vm.run(&program, &["spawner", "4"]).wait_for_success();
        if ["40000", "80000"]
            .iter()
            .all(|host| said.contains(&format!("by tasker on {host}")))
        {
            return;
        }
        assert!(
            begin.elapsed() < common::vm::WAIT_TIMEOUT,
            "the taskers do not serve: {said}"
        );
    }
}
