//! Whole jobs of real processes: ended, and begun from a file.

use sempa_tests::needs::testbed;
use sempa_tests::run::Running;
use sempa_tests::vm::Settings;
use sempa_tests::{Vm, eventually};
use std::process::Stdio;
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);

fn with_rm(test: impl FnOnce(&Vm)) {
    let Some((bed, _)) = testbed(2) else { return };
    let vm = Vm::start(&bed, Settings { rm: Some("pvm-rm".into()), ..Settings::default() }).expect("a virtual machine");
    vm.add(&["h2"]).expect("it joins");
    test(&vm);
    vm.halt().expect("halts");
}

#[test]
fn a_job_whose_tasks_ignore_the_request_to_end_is_ended_until_nothing_of_it_is_left() {
    with_rm(|vm| {
        let program = vm.program("deaf").expect("gcc");
        let mut command = vm.command(vm.bed().host(1), program);
        command.arg("5");
        let mut top = Running::start(command, Stdio::null()).expect("it starts");
        let out = eventually(SOON, || {
            let out = top.out_so_far().map_err(|error| format!("{error:#}"))?;
            if out.ends_with('\n') { Ok(out) } else { Err(format!("{out}\n{}", vm.logs())) }
        });
        let tid = out.expect("all are there").trim().strip_prefix("ready ").expect("its tid").to_string();
        let deaf = || vm.tasks().expect("tasks").into_iter().filter(|task| task.name.ends_with("deaf")).count();
        assert_eq!(deaf(), 5);
        let answer = vm.json(&["job", "kill", &tid]).unwrap_or_else(|error| panic!("{error:#}\n{}", vm.logs()));
        let count = |name: &str| answer[0][name].as_u64();
        assert_eq!((count("asked"), count("left")), (Some(6), Some(0)), "{answer:?}");
        // All but the one that listens.
        assert_eq!(count("forced"), Some(5), "{answer:?}");
        assert_eq!(deaf(), 0);
        let status = eventually(SOON, || top.poll().map_err(|e| format!("{e:#}"))?.ok_or("it runs".to_string()));
        assert!(!status.expect("it was killed").success());
        for host in vm.bed().hosts() {
            let left = host.processes();
            assert!(left.iter().all(|(_, line)| !line.contains("/deaf")), "{left:?}");
        }
    });
}

#[test]
fn a_job_file_starts_what_it_says_where_it_says_and_a_mistake_is_told_with_its_line() {
    with_rm(|vm| {
        vm.program("hold").expect("gcc");
        let file = vm.bed().folder().join("job.toml");
        let write = |text: &str| std::fs::write(&file, text).expect("it can be written");
        let path = file.to_string_lossy().into_owned();
        write(
            "program = \"hold\"\narguments = [\"1\"]\ncount = 2\nwants = \"host = h2\"\n[environment]\nCOLOUR = \"blue\"\n",
        );
        vm.pvm(&["spawn", "--job", &path]).expect("pvm").expect_good("spawn").expect("it is started");
        let tasks = vm.tasks().expect("tasks");
        let held: Vec<_> = tasks.iter().filter(|task| task.name.ends_with("hold")).collect();
        assert_eq!(held.len(), 2, "{tasks:?}");
        for task in held {
            assert_eq!(task.host.as_deref(), Some("h2"), "{task:?}");
            vm.pvm(&["kill", &task.tid]).expect("pvm").expect_good("kill").expect("it ends");
        }
        write("program = \"hold\"\n\ncuont = 2\n");
        let wrong = vm.pvm(&["spawn", "--job", &path]).expect("pvm");
        assert!(!wrong.good() && wrong.err.contains("job.toml, line 3: unknown field `cuont`"), "{wrong:?}");
    });
}
