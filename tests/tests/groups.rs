//! Groups without a server task. Members on several hosts wait in barriers, make collective calls,
//! are killed, migrate, and lose their hosts.

use sempa_tests::requirements::{require_prefix_in_hosts, require_program, require_testbed};
use sempa_tests::run::{RunningCommand, run_to_end};
use sempa_tests::vm::VmSettings;
use sempa_tests::{Host, Testbed, Vm, wait_for};
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, Stdio};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);
const EXAMPLE_TIMEOUT: Duration = Duration::from_secs(120);

/// A running member that reads commands from standard input.
struct Member<'a> {
    host: &'a Host,
    task: RunningCommand,
    input: ChildStdin,
    command_count: usize,
}

impl<'a> Member<'a> {
    fn start(vm: &'a Vm, host: usize, program: &Path) -> Self {
        let host = vm.testbed().host(host);
        let mut task = RunningCommand::start(vm.user_command(host, program), Stdio::piped())
            .expect("it starts");
        let stdin = task.take_stdin().expect("piped");
        let member = Member {
            host,
            task,
            input: stdin,
            command_count: 0,
        };
        member.wait_for_line("task t", 0);
        member
    }

    /// Waits for the line number `line_index` (counted from 0) in the member's output. Returns the
    /// text after `prefix` in this line. Panics if the line does not start with `prefix`.
    fn wait_for_line(&self, prefix: &str, line_index: usize) -> String {
        let line_result = wait_for(TIMEOUT, || {
            let out = self
                .task
                .stdout_so_far()
                .map_err(|error| error.to_string())?;
            let mut complete_lines = out
                .split_inclusive('\n')
                .filter(|line| line.ends_with('\n'));
            let line = complete_lines.nth(line_index).ok_or_else(|| {
                format!(
                    "line {line_index} ({prefix}) is missing: {out}{}",
                    self.task.stderr_so_far().unwrap_or_default()
                )
            })?;
            Ok(line.trim().to_string())
        });
        let line = line_result.unwrap_or_else(|error| panic!("{error:#}"));
        let text = line.strip_prefix(prefix);
        text.unwrap_or_else(|| panic!("{prefix} was expected, not {line}"))
            .to_string()
    }

    /// Sends a command to the member. Returns the start and the number of the output line with the
    /// command's result; [`Member::wait_for_result`] waits for this line.
    fn send_command(&mut self, command: &str) -> (String, usize) {
        writeln!(self.input, "{command}").expect("it listens");
        self.command_count += 1;
        (format!("{command} = "), self.command_count)
    }

    fn wait_for_result(&self, (prefix, line_index): (String, usize)) -> i32 {
        self.wait_for_line(&prefix, line_index)
            .parse()
            .expect("a number")
    }

    fn run_command(&mut self, command: &str) -> i32 {
        let result_line = self.send_command(command);
        self.wait_for_result(result_line)
    }

    fn kill(&self) {
        let task_line = self.wait_for_line("task t", 0);
        let pid = task_line.rsplit(' ').next().expect("words").to_string();
        assert!(
            self.host
                .run_shell(&format!("kill -9 {pid}"), TIMEOUT)
                .expect("runs")
                .succeeded(),
            "kill -9 {pid}"
        );
    }
}

fn with_hosts(host_count: usize, test: impl FnOnce(&Vm, &Path)) {
    let bed = require_testbed(host_count);
    let vm = Vm::start(&bed, VmSettings::default()).expect("a virtual machine");
    let other_hosts: Vec<String> = (2..=host_count)
        .map(|number| format!("h{number}"))
        .collect();
    if host_count > 1 {
        vm.add_hosts(&other_hosts.iter().map(String::as_str).collect::<Vec<_>>())
            .expect("the others join");
    }
    let program = vm.compile_program("groups").expect("gcc");
    test(&vm, &program);
    vm.halt_and_wait().expect("halts");
}

/// Starts one member for each number of a host in `hosts`. All members join the group `g`.
fn start_members<'a>(vm: &'a Vm, program: &Path, hosts: &[usize]) -> Vec<Member<'a>> {
    let mut members: Vec<Member> = hosts
        .iter()
        .map(|host| Member::start(vm, *host, program))
        .collect();
    for (instance, member) in members.iter_mut().enumerate() {
        assert_eq!(member.run_command("join g"), instance as i32);
    }
    members
}

fn wait_for_barrier(vm: &Vm, waiting_count: usize) {
    let check = || {
        let gstat_output = run_to_end(vm.user_command(vm.testbed().host(1), "pvm_gstat"), TIMEOUT)
            .map_err(|error| error.to_string())?;
        let expected_text = format!("barrier_reached {waiting_count}\n");
        if gstat_output.stdout.contains(&expected_text) {
            Ok(())
        } else {
            Err(format!("{waiting_count} do not wait: {gstat_output:?}"))
        }
    };
    wait_for(TIMEOUT, check).expect("members wait");
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn members_join_and_leave_barriers_together() {
    with_hosts(2, |vm, program| {
        let mut members = start_members(vm, program, &[1, 2, 2]);
        assert_eq!(
            (
                members[0].run_command("join g"),
                members[0].run_command("size g"),
                members[2].run_command("inst g")
            ),
            (-18, 3, 2)
        );
        assert_eq!(
            (
                members[0].run_command("tid g 7"),
                members[0].run_command("size nobody"),
                members[0].run_command("barrier g 0")
            ),
            (-21, -19, -3)
        );
        assert_eq!(
            (
                members[1].run_command("leave g"),
                members[1].run_command("barrier g 2"),
                members[1].run_command("join g")
            ),
            (0, -20, 1)
        );
        // Members in a barrier also receive messages.
        assert_eq!(members[1].run_command("listen 5"), 0);
        let first_barrier = members[1].send_command("barrier g 3");
        wait_for_barrier(vm, 1);
        assert_eq!(members[0].run_command("bcast g 5"), 0);
        assert_eq!(
            (
                members[2].run_command("recv 5"),
                members[2].run_command("barrier g 2")
            ),
            (0, -3)
        );
        let second_barrier = members[2].send_command("barrier g 3");
        assert_eq!(
            (
                members[0].run_command("barrier g 3"),
                members[1].wait_for_result(first_barrier),
                members[2].wait_for_result(second_barrier)
            ),
            (0, 0, 0)
        );
        wait_for(TIMEOUT, || match members[1].run_command("handled") {
            1 => Ok(()),
            other => Err(format!("{other} messages were handled")),
        })
        .expect("the handler ran");
        // A member that leaves the virtual machine also leaves its groups. Its instance number is
        // then free for another member.
        let barrier_of_0 = members[0].send_command("barrier g 3");
        let barrier_of_1 = members[1].send_command("barrier g 3");
        wait_for_barrier(vm, 2);
        assert_eq!(members[2].run_command("exit"), 0);
        assert_eq!(
            (
                members[2].run_command("join g"),
                members[2].run_command("barrier g 3")
            ),
            (2, 0)
        );
        assert_eq!(
            (
                members[0].wait_for_result(barrier_of_0),
                members[1].wait_for_result(barrier_of_1)
            ),
            (0, 0)
        );
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn collective_calls_support_every_type() {
    with_hosts(2, |vm, program| {
        let mut members = start_members(vm, program, &[1, 2, 1, 2]);
        for root in [0, 3] {
            let result_lines: Vec<_> = members
                .iter_mut()
                .map(|member| member.send_command(&format!("collective g {root}")))
                .collect();
            for (member, result_lines) in members.iter().zip(result_lines) {
                assert_eq!(member.wait_for_result(result_lines), 0, "root {root}");
            }
        }
        assert_eq!(
            (
                members[1].run_command("leave g"),
                members[0].run_command("gather g 0"),
                members[0].run_command("gather g 9")
            ),
            (0, -21, -21)
        );
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn waiting_members_learn_of_killed_member() {
    with_hosts(2, |vm, program| {
        let mut members = start_members(vm, program, &[1, 2, 2]);
        let barriers: Vec<_> = members[..2]
            .iter_mut()
            .map(|member| member.send_command("barrier g 3"))
            .collect();
        wait_for_barrier(vm, 2);
        members[2].kill();
        for (member, barrier) in members.iter().zip(barriers) {
            assert_eq!(member.wait_for_result(barrier), -19);
        }
        assert_eq!(members[0].run_command("size g"), 2);
        // This member is killed while it waits in the barrier.
        let barriers = members[0].send_command("barrier g 2");
        wait_for_barrier(vm, 1);
        members[0].kill();
        wait_for(TIMEOUT, || match members[1].run_command("size g") {
            1 => Ok(()),
            size => Err(format!("{size} members")),
        })
        .expect("its membership ends");
        drop(barriers);
        assert_eq!(members[1].run_command("barrier g 1"), 0);
    });
}

/// When a member leaves, the waiting members of a frozen group get an error. No task can join a
/// frozen group.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn frozen_group_accepts_no_members() {
    with_hosts(1, |vm, program| {
        let mut members = start_members(vm, program, &[1, 1, 1]);
        let freezes: Vec<_> = members[..2]
            .iter_mut()
            .map(|member| member.send_command("freeze g 3"))
            .collect();
        assert_eq!(members[2].run_command("freeze g 3"), 3);
        for (member, freeze) in members.iter().zip(freezes) {
            assert_eq!(member.wait_for_result(freeze), 3);
        }
        let mut new_member = Member::start(vm, 1, program);
        assert_eq!(
            (
                new_member.run_command("join g"),
                members[0].run_command("freeze g 3"),
                new_member.run_command("size g")
            ),
            (-20, -18, 3)
        );
        let barrier = members[0].send_command("barrier g 3");
        wait_for_barrier(vm, 1);
        assert_eq!(
            (
                members[2].run_command("leave g"),
                members[0].wait_for_result(barrier),
                members[1].run_command("barrier g 3")
            ),
            (0, -19, -19)
        );
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn receiver_is_notified_of_ended_member() {
    with_hosts(2, |vm, program| {
        let mut members = start_members(vm, program, &[1, 2, 2]);
        let root = members[0].send_command("gather g 0");
        // The root uses the contribution that a member sent before the member was killed.
        assert_eq!(members[1].run_command("gather g 0"), 0);
        members[1].kill();
        members[2].kill();
        assert_eq!(members[0].wait_for_result(root), -21);
        assert_eq!(members[0].run_command("size g"), 1);
        // The root is killed while a member waits for its part of the root's data.
        let mut root = Member::start(vm, 2, program);
        assert_eq!(root.run_command("join g"), 1);
        let scatter = members[0].send_command("scatter g 1");
        root.kill();
        assert_eq!(members[0].wait_for_result(scatter), -21);
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_group_survives_the_loss_of_a_host() {
    with_hosts(3, |vm, program| {
        let mut members = start_members(vm, program, &[1, 2, 3]);
        let barriers: Vec<_> = members[..2]
            .iter_mut()
            .map(|member| member.send_command("barrier g 3"))
            .collect();
        wait_for_barrier(vm, 2);
        vm.testbed().host(3).kill_all_processes();
        for (member, barrier) in members.iter().zip(barriers) {
            assert_eq!(member.wait_for_result(barrier), -19);
        }
        let barriers = members[0].send_command("barrier g 2");
        assert_eq!(
            (
                members[1].run_command("barrier g 2"),
                members[0].wait_for_result(barriers),
                members[1].run_command("size g")
            ),
            (0, 0, 2)
        );
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_member_moves_during_a_barrier() {
    with_hosts(3, |vm, program| {
        let name = program
            .file_name()
            .and_then(|name| name.to_str())
            .expect("a name");
        let tid = vm
            .spawn_connected(&[
                "-h2",
                name,
                "join g",
                "barrier g 2",
                "keep result",
                "size g",
                "keep size",
            ])
            .expect("spawned");
        wait_for_barrier(vm, 1);
        vm.migrate_or_panic(&tid, "h3");
        assert_eq!(vm.host_of(&tid).expect("a task"), "h3");
        let mut second_member = Member::start(vm, 1, program);
        assert_eq!(
            (
                second_member.run_command("join g"),
                second_member.run_command("barrier g 2")
            ),
            (1, 0)
        );
        assert_eq!(
            (
                second_member.run_command("await result"),
                second_member.run_command("await size")
            ),
            (0, 2)
        );
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and Debian's PVM"]
fn groups_are_shown_by_our_programs_and_by_debians() {
    with_hosts(1, |vm, program| {
        let run_program = |program: &str| {
            run_to_end(vm.user_command(vm.testbed().host(1), program), TIMEOUT).expect("it ends")
        };
        assert_eq!(run_program("pvm_gstat").stdout, "no groups exist\n");
        let mut members = start_members(vm, program, &[1, 1]);
        assert_eq!(members[1].run_command("join second"), 0);
        let barrier = members[1].send_command("barrier g 2");
        wait_for_barrier(vm, 1);
        let gstat_output = run_program("pvm_gstat");
        assert!(
            gstat_output.succeeded()
                && gstat_output
                    .stdout
                    .starts_with("group: g, size: 2,  barrier_count 2, barrier_reached 1\n"),
            "{gstat_output:?}"
        );
        assert!(
            gstat_output
                .stdout
                .contains("group: second, size: 1,  barrier_count -1, barrier_reached 0\n"),
            "{gstat_output:?}"
        );
        let dump_output = run_program("pvmgroups");
        assert!(
            dump_output.succeeded()
                && dump_output
                    .stdout
                    .starts_with("DUMP 2 groups:\n group: g  size: 2 "),
            "{dump_output:?}"
        );
        for name in ["pvm_gstat", "pvmgroups"] {
            let debian_program = Path::new("/usr/bin").join(name);
            require_program(&debian_program.to_string_lossy(), "pvm");
            let debian_output = run_to_end(
                vm.user_command(vm.testbed().host(1), debian_program),
                TIMEOUT,
            )
            .expect("it ends");
            let text = if name == "pvm_gstat" {
                debian_output.stdout.clone()
            } else {
                debian_output.stderr.clone()
            };
            assert!(
                debian_output.succeeded()
                    && text.contains("group: g")
                    && text.contains("group: second"),
                "{debian_output:?}"
            );
            assert!(
                name != "pvm_gstat" || debian_output.stdout == gstat_output.stdout,
                "{debian_output:?} is not {gstat_output:?}"
            );
        }
        assert_eq!(
            (
                members[0].run_command("barrier g 2"),
                members[1].wait_for_result(barrier)
            ),
            (0, 0)
        );
    });
}

/// Debian's group programs, as (name, arguments, input, text that is printed on success).
const EXAMPLES: [(&str, &[&str], &str, &str); 10] = [
    (
        "gexample",
        &[],
        "10 4\n",
        "The product of column 1 is 3.6288e+06",
    ),
    ("fgexample", &[], "", "The 1-Norm is         5050"),
    (
        "trsg",
        &[],
        "8 4\n",
        "Test OK: Sum of Squares of first 32 integers is 11440",
    ),
    // The sum that `frsg` prints starts with an uninitialised variable, so the line of the sum is
    // not checked. The line here shows that the group of `frsg` works.
    ("frsg", &[], "8\n4\n", "Test Ok: Received ("),
    ("ge", &["4"], "", "done"),
    ("gexamp", &["4"], "", "gexamp 0: sync"),
    // Only the member with instance 0 prints more, and any member may have this instance.
    ("gs.pvm", &["4"], "", "enrolled"),
    ("joinleave", &["200"], "", "Joined 200 times"),
    ("thb", &["3"], "", "leaving all the groups"),
    ("tst", &[], "", "left prognosis 0, negative 0"),
];

fn link_examples(bed: &Testbed) {
    for (name, ..) in EXAMPLES.iter().chain(&[("tnb", &[][..], "", "")]) {
        symlink(
            Path::new("/usr/bin").join(name),
            bed.root_home().join("pvm3/bin/LINUX64").join(name),
        )
        .expect("a link");
    }
}

/// Runs an example to its end. Panics unless its standard output or standard error contains
/// `expected_text`.
fn check_example(vm: &Vm, program: &Path, args: &[&str], input: &str, expected_text: &str) {
    let mut command = vm.user_command(vm.testbed().host(1), program);
    command.args(args);
    let mut task = RunningCommand::start(command, Stdio::piped()).expect("it starts");
    // A program without input may have ended already, so an error is ignored.
    let _ = task
        .take_stdin()
        .expect("piped")
        .write_all(input.as_bytes());
    let output = task.wait_or_kill(EXAMPLE_TIMEOUT).unwrap_or_else(|error| {
        panic!("{}: {error:#}\n{}", program.display(), vm.events_and_logs())
    });
    let all_text = output.stdout.clone() + &output.stderr;
    assert!(
        all_text.contains(expected_text),
        "{}: {output:?}\n{}",
        program.display(),
        vm.events_and_logs()
    );
}

/// Waits until the program `gstat` on h1 reports no group. Panics if a group remains.
fn wait_for_no_groups(vm: &Vm, gstat: &str) {
    wait_for(TIMEOUT, || {
        let gstat_output = run_to_end(vm.user_command(vm.testbed().host(1), gstat), TIMEOUT)
            .map_err(|error| error.to_string())?;
        if gstat_output.stdout == "no groups exist\n" {
            Ok(())
        } else {
            Err(format!("{gstat_output:?}"))
        }
    })
    .expect("programs that ended are in no group");
}

#[test]
#[ignore = "system tier: needs root, hosts and Debian's PVM"]
fn debians_group_programs_run_unmodified() {
    with_hosts(2, |vm, _| {
        link_examples(vm.testbed());
        for (name, args, input, expected_text) in EXAMPLES {
            let program = Path::new("/usr/bin").join(name);
            require_program(&program.to_string_lossy(), "pvm-examples");
            check_example(vm, &program, args, input, expected_text);
            // Two programs use the same frozen group, which exists until its last member exits.
            wait_for_no_groups(vm, "pvm_gstat");
        }
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and Debian's PVM"]
fn pvms_own_group_library_and_server_work() {
    require_program("/usr/bin/pvmgs", "pvm");
    check_pvms_own_group_library(Some(Path::new("/usr/bin/pvmgs")));
}

/// The library finds the installed `pvmgs` if the user has no other one.
#[test]
#[ignore = "system tier: needs root, hosts and Debian's PVM"]
fn pvms_own_group_library_works_with_installed_server() {
    check_pvms_own_group_library(None);
}

/// Runs PVM's examples with PVM's own group library. `server` is a group server for the user's
/// folder of programs.
fn check_pvms_own_group_library(server: Option<&Path>) {
    let debian_library = "/usr/lib/x86_64-linux-gnu/libgpvm3.so.3";
    require_program(debian_library, "pvm");
    let bed = require_testbed(1);
    let prefix = require_prefix_in_hosts();
    let folder = bed.folder().join("their-groups");
    std::fs::create_dir(&folder).expect("a folder");
    symlink(debian_library, folder.join("libgpvm3.so.3")).expect("a link");
    symlink(prefix.join("lib/libpvm3.so.3"), folder.join("libpvm3.so.3")).expect("a link");
    if let Some(server) = server {
        symlink(server, bed.root_home().join("pvm3/bin/LINUX64/pvmgs")).expect("a link");
    }
    let env = ["SEMPA_LIB", "LD_LIBRARY_PATH"]
        .map(|name| (name.to_string(), folder.display().to_string()));
    let vm = Vm::start(
        &bed,
        VmSettings {
            env: env.to_vec(),
            ..VmSettings::default()
        },
    )
    .expect("a virtual machine");
    link_examples(&bed);
    // Debian's server forgets a barrier if a member ends, so it runs one example only.
    let example_count = if server.is_some() { 1 } else { EXAMPLES.len() };
    for (name, args, input, expected_text) in &EXAMPLES[..example_count] {
        let program = Path::new("/usr/bin").join(name);
        check_example(&vm, &program, args, input, expected_text);
        // The server learns of the end of the members by messages.
        wait_for_no_groups(&vm, "/usr/bin/pvm_gstat");
    }
    assert!(
        vm.tasks()
            .expect("tasks")
            .iter()
            .any(|task| task.name == "pvmgs"),
        "their server runs"
    );
    vm.halt_and_wait().expect("halts");
}

#[test]
#[ignore = "system tier: needs root, hosts and Debian's PVM"]
fn tracer_gets_one_record_per_group_call() {
    let tracer = "/usr/bin/tracer";
    require_program(tracer, "pvm");
    with_hosts(1, |vm, program| {
        let trace_file = vm.testbed().folder().join("trace");
        let mut command = vm.user_command(vm.testbed().host(1), tracer);
        command.args(["-T".as_ref(), trace_file.as_os_str(), "full".as_ref()]);
        let mut tracer = RunningCommand::start(command, Stdio::piped()).expect("it starts");
        let mut input = tracer.take_stdin().expect("piped");
        input
            .write_all(b"trace + gather\ntrace + setsbuf\n")
            .expect("it listens");
        let check_ready = || match tracer.stdout_so_far() {
            Ok(out) if out.contains("* setsbuf") => Ok(()),
            other => Err(format!("not yet: {other:?}")),
        };
        wait_for(TIMEOUT, check_ready).expect("a tracer");
        let mut member = Member::start(vm, 1, program);
        assert_eq!(
            (
                member.run_command("join g"),
                member.run_command("gather g 0")
            ),
            (0, 0)
        );
        // The tracer checks its inbox only when a message arrives, so the member makes further
        // calls after the traced ones.
        let trace_text = wait_for(TIMEOUT, || {
            member.run_command("barrier g 1");
            let text = std::fs::read_to_string(&trace_file).map_err(|error| error.to_string())?;
            if text.contains("\"barrier(1.1)\" {") {
                Ok(text)
            } else {
                Err(text)
            }
        });
        let trace_text = trace_text.unwrap_or_else(|error| panic!("{error:#}"));
        for record_start in [
            "\"joingroup(0.0)\" {",
            "\"gather(0.0)\" {",
            "\"gather(1.1)\" {",
            "\"barrier(0.0)\" {",
        ] {
            let line = trace_text
                .lines()
                .find(|line| line.starts_with(record_start))
                .unwrap_or_else(|| panic!("{record_start}: {trace_text}"));
            assert!(
                record_start.contains("1.1") || line.contains("{ \"g\" }"),
                "{line}"
            );
        }
        assert!(
            !trace_text.contains("setsbuf"),
            "what a gather does inside is no call of the program: {trace_text}"
        );
    });
}

/// Compiles the program of these tests with the static group library. Returns the path of the
/// program.
fn compile_with_static_library(vm: &Vm) -> PathBuf {
    let prefix = vm.testbed().prefix().expect("installed");
    let program = vm.user_home().join("pvm3/bin/LINUX64/groups-static");
    let mut gcc = Command::new("gcc");
    gcc.args(["-std=gnu11", "-O2", "-o"])
        .arg(&program)
        .arg("-I")
        .arg(prefix.join("include"));
    gcc.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("programs/groups.c"));
    gcc.arg(prefix.join("lib/libgpvm3.a"))
        .arg("-L")
        .arg(prefix.join("lib"))
        .args(["-lpvm3", "-lm"]);
    let output = run_to_end(gcc, EXAMPLE_TIMEOUT).expect("gcc");
    assert!(output.succeeded(), "{output:?}");
    program
}

/// The static group library works together with the shared library libpvm3.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn the_static_group_library_works() {
    with_hosts(1, |vm, _| {
        let program = compile_with_static_library(vm);
        let mut members = start_members(vm, &program, &[1, 1]);
        let result_line = members[0].send_command("collective g 0");
        assert_eq!(
            (
                members[1].run_command("collective g 0"),
                members[0].wait_for_result(result_line)
            ),
            (0, 0)
        );
    });
}
