//! Tests of taskers, hosters and resource managers that do not belong to Sempa: small C programs
//! serve a real virtual machine with the documented messages. When such a program dies, the daemon
//! serves the requests again.

mod common;

use common::vm::Vm;
use common::{Program, include_dir};

fn compile_serving_program() -> Program {
    Program::compile("served", &include_dir())
}

/// A registered tasker starts the tasks of its host. After the death of the tasker the daemon
/// starts the tasks.
#[test]
#[ignore = "system tier: needs gcc"]
fn daemon_starts_tasks_after_the_tasker_dies() {
    let (vm, program) = (Vm::start(), compile_serving_program());
    let mut tasker = vm.start_program(&program, &["tasker"]);
    tasker.wait_for_output("serving");
    let output = vm
        .start_program(&program, &["spawner", "5"])
        .wait_for_success();
    assert_eq!(output.matches("by tasker on 40000").count(), 5, "{output}");
    let mut exit_watcher = vm.start_program(&program, &["watcher"]);
    exit_watcher.wait_for_output("watching");
    tasker.kill();
    exit_watcher.wait_for_output("told");
    exit_watcher.wait_for_success();
    let output = vm
        .start_program(&program, &["spawner", "2"])
        .wait_for_success();
    assert_eq!(output.matches("by daemon").count(), 2, "{output}");
}

/// A registered hoster starts daemons. After the death of the hoster, also during a request, the
/// master starts the daemons, except daemons that a person must start (`so=ms`). A task can
/// register as hoster only on the master's host, and as tasker on any host.
#[test]
#[ignore = "system tier: needs gcc"]
fn master_starts_daemons_after_the_hoster_dies() {
    let (vm, program) = (Vm::start(), compile_serving_program());
    let mut hoster = vm.start_program(&program, &["hoster"]);
    hoster.wait_for_output("serving");
    let output = vm
        .start_program(&program, &["add", "h2", "refused", "h3 so=ms"])
        .wait_for_success();
    assert!(
        output.contains("added 2\nh2 524288\nrefused -28\nh3 so=ms 1048576\n"),
        "{output}"
    );
    hoster.wait_for_output("order h3 so=ms");
    hoster.kill();
    let output = vm
        .start_program(&program, &["add", "h4 so=ms", "h5"])
        .wait_for_success();
    assert!(
        output.contains("added 1\nh4 so=ms -29\nh5 "),
        "without a hoster a person would have to be asked: {output}"
    );
    let mut silent_hoster = vm.start_program(&program, &["hoster", "silent"]);
    silent_hoster.wait_for_output("serving");
    let add_program = vm.start_program(&program, &["add", "h6"]);
    silent_hoster.wait_for_output("heard");
    silent_hoster.kill();
    assert!(add_program.wait_for_success().contains("added 1\n"));
    let output = vm
        .start_program_on("h2", &program, &["register"])
        .wait_for_success();
    assert_eq!(
        output, "hoster -34 tasker 0\n",
        "a hoster is for the master's host, a tasker for each"
    );
}

/// Only one task at a time can serve in a role, and the task can release the role.
#[test]
#[ignore = "system tier: needs gcc"]
fn service_has_one_task_and_can_be_released() {
    let (vm, program) = (Vm::start(), compile_serving_program());
    vm.start_program(&program, &["twice"]).wait_for_success();
    let mut tasker = vm.start_program(&program, &["tasker"]);
    tasker.wait_for_output("serving");
    assert_eq!(
        vm.start_program(&program, &["register"]).wait_for_success(),
        "hoster 0 tasker -30\n"
    );
}

/// Each host may have its own resource manager. A resource manager may refuse the registration of
/// another task as resource manager. After the death of the resource managers the daemon starts the
/// tasks.
#[test]
#[ignore = "system tier: needs gcc"]
fn each_host_may_have_its_own_rm() {
    let (vm, program) = (Vm::start(), compile_serving_program());
    vm.start_program(&program, &["add", "h2"])
        .wait_for_success();
    let mut first_rm = vm.start_program(&program, &["manager", "40000"]);
    first_rm.wait_for_output("before 0 master 40000\nserving");
    let mut second_rm = vm.start_program_on("h2", &program, &["manager", "80000"]);
    second_rm.wait_for_output("before 0 master 40000\nserving");
    for (host, tid) in [("master", "40000"), ("h2", "80000")] {
        let output = vm
            .start_program_on(host, &program, &["spawner", "3"])
            .wait_for_success();
        assert_eq!(output.matches(&format!("on {tid}")).count(), 3, "{output}");
    }
    assert_eq!(
        vm.start_program(&program, &["deposed"]).wait_for_success(),
        "-8\n",
        "the one that is there refuses"
    );
    second_rm.kill();
    first_rm.kill();
    let output = vm
        .start_program(&program, &["spawner", "2"])
        .wait_for_success();
    assert_eq!(output.matches("by daemon").count(), 2, "{output}");
}

/// Each daemon starts the tasker that the variable `PVM_TASKER` names.
#[test]
#[ignore = "system tier: needs gcc"]
fn environment_names_the_tasker_of_each_daemon() {
    let program = compile_serving_program();
    let vm = Vm::start_with(&[("PVM_TASKER", format!("{} tasker", program.path().display()))]);
    vm.start_program(&program, &["add", "h2"])
        .wait_for_success();
    let start_time = std::time::Instant::now();
    loop {
        let output = vm
            .start_program(&program, &["spawner", "4"])
            .wait_for_success();
        if ["40000", "80000"]
            .iter()
            .all(|host| output.contains(&format!("by tasker on {host}")))
        {
            return;
        }
        assert!(
            start_time.elapsed() < common::vm::WAIT_TIMEOUT,
            "the taskers do not serve: {output}"
        );
    }
}
