//! Groups without a server task: members on several hosts wait in barriers and make collective
//! calls, are killed, migrate, and lose their hosts.

use sempa_tests::requirements::{prefix_in_bed, require_program, testbed};
use sempa_tests::run::{RunningCommand, run};
use sempa_tests::vm::Settings;
use sempa_tests::{Host, Testbed, Vm, wait_for};
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, Stdio};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);
const END_TIMEOUT: Duration = Duration::from_secs(120);

/// A running member that reads commands from standard input.
struct Member<'a> {
    host: &'a Host,
    task: RunningCommand,
    input: ChildStdin,
    command_count: usize,
}

impl<'a> Member<'a> {
    fn start(vm: &'a Vm, host: usize, program: &Path) -> Member<'a> {
        let host = vm.bed().host(host);
        let mut task =
            RunningCommand::start(vm.command(host, program), Stdio::piped()).expect("it starts");
        let to = task.take_stdin().expect("piped");
        let member = Member {
            host,
            task,
            input: to,
            command_count: 0,
        };
        member.wait_for_line("task t", 0);
        member
    }

    /// Waits for the line number `number` (counted from 0) in the member's output. Returns what
    /// follows `start` in this line.
    fn wait_for_line(&self, start: &str, number: usize) -> String {
        let found = wait_for(TIMEOUT, || {
            let out = self.task.out_so_far().map_err(|error| error.to_string())?;
            let mut whole = out
                .split_inclusive('\n')
                .filter(|line| line.ends_with('\n'));
            let line = whole.nth(number).ok_or_else(|| {
                format!(
                    "line {number} ({start}) is missing: {out}{}",
                    self.task.err_so_far().unwrap_or_default()
                )
            })?;
            Ok(line.trim().to_string())
        });
        let line = found.unwrap_or_else(|error| panic!("{error:#}"));
        let rest = line.strip_prefix(start);
        rest.unwrap_or_else(|| panic!("{start} was expected, not {line}"))
            .to_string()
    }

    /// Sends a command to the member. [`Member::result`] waits for the result of the returned
    /// command.
    fn send_command(&mut self, command: &str) -> (String, usize) {
        writeln!(self.input, "{command}").expect("it listens");
        self.command_count += 1;
        (format!("{command} = "), self.command_count)
    }

    fn result(&self, (start, number): (String, usize)) -> i32 {
        self.wait_for_line(&start, number)
            .parse()
            .expect("a number")
    }

    fn run_command(&mut self, command: &str) -> i32 {
        let asked = self.send_command(command);
        self.result(asked)
    }

    fn kill(&self) {
        let line = self.wait_for_line("task t", 0);
        let process = line.rsplit(' ').next().expect("words").to_string();
        assert!(
            self.host
                .shell(&format!("kill -9 {process}"), TIMEOUT)
                .expect("runs")
                .succeeded(),
            "kill -9 {process}"
        );
    }
}

fn on_hosts(count: usize, test: impl FnOnce(&Vm, &Path)) {
    let bed = testbed(count);
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    let others: Vec<String> = (2..=count).map(|number| format!("h{number}")).collect();
    if count > 1 {
        vm.add(&others.iter().map(String::as_str).collect::<Vec<_>>())
            .expect("the others join");
    }
    let program = vm.compile_program("groups").expect("gcc");
    test(&vm, &program);
    vm.halt().expect("halts");
}

/// Starts one member on each of these hosts. All members join the group.
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

fn wait_for_barrier(vm: &Vm, wanted: usize) {
    let look = || {
        let shown = run(vm.command(vm.bed().host(1), "pvm_gstat"), TIMEOUT)
            .map_err(|error| error.to_string())?;
        let reached = format!("barrier_reached {wanted}\n");
        if shown.out.contains(&reached) {
            Ok(())
        } else {
            Err(format!("{wanted} do not wait: {shown:?}"))
        }
    };
    wait_for(TIMEOUT, look).expect("members wait");
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn members_join_and_leave_barriers_together() {
    on_hosts(2, |vm, program| {
        let mut m = start_members(vm, program, &[1, 2, 2]);
        assert_eq!(
            (
                m[0].run_command("join g"),
                m[0].run_command("size g"),
                m[2].run_command("inst g")
            ),
            (-18, 3, 2)
        );
        assert_eq!(
            (
                m[0].run_command("tid g 7"),
                m[0].run_command("size nobody"),
                m[0].run_command("barrier g 0")
            ),
            (-21, -19, -3)
        );
        assert_eq!(
            (
                m[1].run_command("leave g"),
                m[1].run_command("barrier g 2"),
                m[1].run_command("join g")
            ),
            (0, -20, 1)
        );
        // A barrier does not prevent that messages are received.
        assert_eq!(m[1].run_command("listen 5"), 0);
        let first = m[1].send_command("barrier g 3");
        wait_for_barrier(vm, 1);
        assert_eq!(m[0].run_command("bcast g 5"), 0);
        assert_eq!(
            (m[2].run_command("recv 5"), m[2].run_command("barrier g 2")),
            (0, -3)
        );
        let second = m[2].send_command("barrier g 3");
        assert_eq!(
            (
                m[0].run_command("barrier g 3"),
                m[1].result(first),
                m[2].result(second)
            ),
            (0, 0, 0)
        );
        wait_for(TIMEOUT, || match m[1].run_command("handled") {
            1 => Ok(()),
            other => Err(format!("{other} messages were handled")),
        })
        .expect("the handler ran");
        // A member that leaves the virtual machine also leaves its groups. Another member may then
        // get its instance number.
        let waits = m[0].send_command("barrier g 3");
        let waits_too = m[1].send_command("barrier g 3");
        wait_for_barrier(vm, 2);
        assert_eq!(m[2].run_command("exit"), 0);
        assert_eq!(
            (m[2].run_command("join g"), m[2].run_command("barrier g 3")),
            (2, 0)
        );
        assert_eq!((m[0].result(waits), m[1].result(waits_too)), (0, 0));
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn collective_calls_support_every_type() {
    on_hosts(2, |vm, program| {
        let mut m = start_members(vm, program, &[1, 2, 1, 2]);
        for root in [0, 3] {
            let asked: Vec<_> = m
                .iter_mut()
                .map(|member| member.send_command(&format!("collective g {root}")))
                .collect();
            for (member, asked) in m.iter().zip(asked) {
                assert_eq!(member.result(asked), 0, "root {root}");
            }
        }
        assert_eq!(
            (
                m[1].run_command("leave g"),
                m[0].run_command("gather g 0"),
                m[0].run_command("gather g 9")
            ),
            (0, -21, -21)
        );
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn waiting_members_learn_of_killed_member() {
    on_hosts(2, |vm, program| {
        let mut m = start_members(vm, program, &[1, 2, 2]);
        let waits: Vec<_> = m[..2]
            .iter_mut()
            .map(|member| member.send_command("barrier g 3"))
            .collect();
        wait_for_barrier(vm, 2);
        m[2].kill();
        for (member, asked) in m.iter().zip(waits) {
            assert_eq!(member.result(asked), -19);
        }
        assert_eq!(m[0].run_command("size g"), 2);
        // The member is killed while another one waits in the barrier.
        let waits = m[0].send_command("barrier g 2");
        wait_for_barrier(vm, 1);
        m[0].kill();
        wait_for(TIMEOUT, || match m[1].run_command("size g") {
            1 => Ok(()),
            size => Err(format!("{size} members")),
        })
        .expect("its membership ends");
        drop(waits);
        assert_eq!(m[1].run_command("barrier g 1"), 0);
    });
}

/// The members of a frozen group are notified when a member is lost. No task can join a frozen
/// group.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn frozen_group_accepts_no_members() {
    on_hosts(1, |vm, program| {
        let mut m = start_members(vm, program, &[1, 1, 1]);
        let first: Vec<_> = m[..2]
            .iter_mut()
            .map(|member| member.send_command("freeze g 3"))
            .collect();
        assert_eq!(m[2].run_command("freeze g 3"), 3);
        for (member, asked) in m.iter().zip(first) {
            assert_eq!(member.result(asked), 3);
        }
        let mut late = Member::start(vm, 1, program);
        assert_eq!(
            (
                late.run_command("join g"),
                m[0].run_command("freeze g 3"),
                late.run_command("size g")
            ),
            (-20, -18, 3)
        );
        let waits = m[0].send_command("barrier g 3");
        wait_for_barrier(vm, 1);
        assert_eq!(
            (
                m[2].run_command("leave g"),
                m[0].result(waits),
                m[1].run_command("barrier g 3")
            ),
            (0, -19, -19)
        );
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn receiver_is_notified_of_ended_member() {
    on_hosts(2, |vm, program| {
        let mut m = start_members(vm, program, &[1, 2, 2]);
        let root = m[0].send_command("gather g 0");
        // The contribution that a member has sent before its end is used.
        assert_eq!(m[1].run_command("gather g 0"), 0);
        m[1].kill();
        m[2].kill();
        assert_eq!(m[0].result(root), -21);
        assert_eq!(m[0].run_command("size g"), 1);
        // The root ends while a member waits for its part of the data.
        let mut root = Member::start(vm, 2, program);
        assert_eq!(root.run_command("join g"), 1);
        let waits = m[0].send_command("scatter g 1");
        root.kill();
        assert_eq!(m[0].result(waits), -21);
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_group_survives_the_loss_of_a_host() {
    on_hosts(3, |vm, program| {
        let mut m = start_members(vm, program, &[1, 2, 3]);
        let waits: Vec<_> = m[..2]
            .iter_mut()
            .map(|member| member.send_command("barrier g 3"))
            .collect();
        wait_for_barrier(vm, 2);
        vm.bed().host(3).kill_all();
        for (member, asked) in m.iter().zip(waits) {
            assert_eq!(member.result(asked), -19);
        }
        let waits = m[0].send_command("barrier g 2");
        assert_eq!(
            (
                m[1].run_command("barrier g 2"),
                m[0].result(waits),
                m[1].run_command("size g")
            ),
            (0, 0, 2)
        );
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_member_moves_during_a_barrier() {
    on_hosts(3, |vm, program| {
        let name = program
            .file_name()
            .and_then(|name| name.to_str())
            .expect("a name");
        let tid = vm
            .spawn(&[
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
        vm.must_migrate(&tid, "h3");
        assert_eq!(vm.host_of(&tid).expect("a task"), "h3");
        let mut other = Member::start(vm, 1, program);
        assert_eq!(
            (
                other.run_command("join g"),
                other.run_command("barrier g 2")
            ),
            (1, 0)
        );
        assert_eq!(
            (
                other.run_command("await result"),
                other.run_command("await size")
            ),
            (0, 2)
        );
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and Debian's PVM"]
fn groups_are_shown_by_our_programs_and_by_debians() {
    on_hosts(1, |vm, program| {
        let show =
            |program: &str| run(vm.command(vm.bed().host(1), program), TIMEOUT).expect("it ends");
        assert_eq!(show("pvm_gstat").out, "no groups exist\n");
        let mut m = start_members(vm, program, &[1, 1]);
        assert_eq!(m[1].run_command("join second"), 0);
        let waits = m[1].send_command("barrier g 2");
        wait_for_barrier(vm, 1);
        let ours = show("pvm_gstat");
        assert!(
            ours.succeeded()
                && ours
                    .out
                    .starts_with("group: g, size: 2,  barrier_count 2, barrier_reached 1\n"),
            "{ours:?}"
        );
        assert!(
            ours.out
                .contains("group: second, size: 1,  barrier_count -1, barrier_reached 0\n"),
            "{ours:?}"
        );
        let dump = show("pvmgroups");
        assert!(
            dump.succeeded() && dump.out.starts_with("DUMP 2 groups:\n group: g  size: 2 "),
            "{dump:?}"
        );
        for name in ["pvm_gstat", "pvmgroups"] {
            let debians = Path::new("/usr/bin").join(name);
            require_program(&debians.to_string_lossy(), "pvm");
            let done = run(vm.command(vm.bed().host(1), debians), TIMEOUT).expect("it ends");
            let text = if name == "pvm_gstat" {
                done.out.clone()
            } else {
                done.err.clone()
            };
            assert!(
                done.succeeded() && text.contains("group: g") && text.contains("group: second"),
                "{done:?}"
            );
            assert!(
                name != "pvm_gstat" || done.out == ours.out,
                "{done:?} is not {ours:?}"
            );
        }
        assert_eq!(
            (m[0].run_command("barrier g 2"), m[1].result(waits)),
            (0, 0)
        );
    });
}

/// Debian's group programs, as (name, arguments, input, line that is printed on success).
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
    // The sum that `frsg` prints starts with an uninitialised variable; this line shows that its
    // group works.
    ("frsg", &[], "8\n4\n", "Test Ok: Received ("),
    ("ge", &["4"], "", "done"),
    ("gexamp", &["4"], "", "gexamp 0: sync"),
    ("gs.pvm", &["4"], "", "waiting on kids to join"),
    ("joinleave", &["200"], "", "Joined 200 times"),
    ("thb", &["3"], "", "leaving all the groups"),
    ("tst", &[], "", "left prognosis 0, negative 0"),
];

fn link_examples(bed: &Testbed) {
    for (name, ..) in EXAMPLES.iter().chain(&[("tnb", &[][..], "", "")]) {
        symlink(
            Path::new("/usr/bin").join(name),
            bed.home().join("pvm3/bin/LINUX64").join(name),
        )
        .expect("a link");
    }
}

/// Runs an example to its end. Panics unless its standard output or standard error has the line
/// `sign`.
fn check_example(vm: &Vm, program: &Path, words: &[&str], input: &str, sign: &str) {
    let mut command = vm.command(vm.bed().host(1), program);
    command.args(words);
    let mut task = RunningCommand::start(command, Stdio::piped()).expect("it starts");
    // A program that reads nothing may have ended before, so an error is ignored.
    let _ = task
        .take_stdin()
        .expect("piped")
        .write_all(input.as_bytes());
    let done = task
        .finish(END_TIMEOUT)
        .unwrap_or_else(|error| panic!("{}: {error:#}\n{}", program.display(), vm.logs()));
    let said = done.out.clone() + &done.err;
    assert!(
        said.contains(sign),
        "{}: {done:?}\n{}",
        program.display(),
        vm.logs()
    );
}

/// Waits until `pvm_gstat` reports no group. Panics if a group remains.
fn wait_for_no_groups(vm: &Vm) {
    wait_for(TIMEOUT, || {
        let stat = run(vm.command(vm.bed().host(1), "pvm_gstat"), TIMEOUT)
            .map_err(|error| error.to_string())?;
        if stat.out == "no groups exist\n" {
            Ok(())
        } else {
            Err(format!("{stat:?}"))
        }
    })
    .expect("programs that ended are in no group");
}

#[test]
#[ignore = "system tier: needs root, hosts and Debian's PVM"]
fn debians_group_programs_run_unmodified() {
    on_hosts(2, |vm, _| {
        link_examples(vm.bed());
        for (name, words, input, sign) in EXAMPLES {
            let program = Path::new("/usr/bin").join(name);
            require_program(&program.to_string_lossy(), "pvm-examples");
            check_example(vm, &program, words, input, sign);
            // Two programs use the same frozen group, which exists until its last member exits.
            wait_for_no_groups(vm);
        }
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and Debian's PVM"]
fn pvms_own_group_library_and_server_work() {
    let theirs = "/usr/lib/x86_64-linux-gnu/libgpvm3.so.3";
    require_program(theirs, "pvm");
    let bed = testbed(1);
    let prefix = prefix_in_bed();
    let folder = bed.folder().join("their-groups");
    std::fs::create_dir(&folder).expect("a folder");
    symlink(theirs, folder.join("libgpvm3.so.3")).expect("a link");
    symlink(prefix.join("lib/libpvm3.so.3"), folder.join("libpvm3.so.3")).expect("a link");
    symlink("/usr/bin/pvmgs", bed.home().join("pvm3/bin/LINUX64/pvmgs")).expect("a link");
    let env = ["SEMPA_LIB", "LD_LIBRARY_PATH"]
        .map(|name| (name.to_string(), folder.display().to_string()));
    let vm = Vm::start(
        &bed,
        Settings {
            env: env.to_vec(),
            ..Settings::default()
        },
    )
    .expect("a virtual machine");
    link_examples(&bed);
    let (name, words, input, sign) = EXAMPLES[0];
    check_example(&vm, &Path::new("/usr/bin").join(name), words, input, sign);
    let shown = run(vm.command(bed.host(1), "/usr/bin/pvm_gstat"), TIMEOUT).expect("it ends");
    assert_eq!(shown.out, "no groups exist\n");
    assert!(
        vm.tasks()
            .expect("tasks")
            .iter()
            .any(|task| task.name == "pvmgs"),
        "their server runs"
    );
    vm.halt().expect("halts");
}

#[test]
#[ignore = "system tier: needs root, hosts and Debian's PVM"]
fn tracer_gets_one_record_per_group_call() {
    let tracer = "/usr/bin/tracer";
    require_program(tracer, "pvm");
    on_hosts(1, |vm, program| {
        let file = vm.bed().folder().join("trace");
        let mut command = vm.command(vm.bed().host(1), tracer);
        command.args(["-T".as_ref(), file.as_os_str(), "full".as_ref()]);
        let mut tracer = RunningCommand::start(command, Stdio::piped()).expect("it starts");
        let mut to = tracer.take_stdin().expect("piped");
        to.write_all(b"trace + gather\ntrace + setsbuf\n")
            .expect("it listens");
        let ready = || match tracer.out_so_far() {
            Ok(out) if out.contains("* setsbuf") => Ok(()),
            other => Err(format!("not yet: {other:?}")),
        };
        wait_for(TIMEOUT, ready).expect("a tracer");
        let mut member = Member::start(vm, 1, program);
        assert_eq!(
            (
                member.run_command("join g"),
                member.run_command("gather g 0")
            ),
            (0, 0)
        );
        // The tracer checks its inbox only when a message arrives, so further calls must follow the
        // traced ones.
        let told = wait_for(TIMEOUT, || {
            member.run_command("barrier g 1");
            let text = std::fs::read_to_string(&file).map_err(|error| error.to_string())?;
            if text.contains("\"barrier(1.1)\" {") {
                Ok(text)
            } else {
                Err(text)
            }
        });
        let told = told.unwrap_or_else(|error| panic!("{error:#}"));
        for record in [
            "\"joingroup(0.0)\" {",
            "\"gather(0.0)\" {",
            "\"gather(1.1)\" {",
            "\"barrier(0.0)\" {",
        ] {
            let line = told
                .lines()
                .find(|line| line.starts_with(record))
                .unwrap_or_else(|| panic!("{record}: {told}"));
            assert!(
                record.contains("1.1") || line.contains("{ \"g\" }"),
                "{line}"
            );
        }
        assert!(
            !told.contains("setsbuf"),
            "what a gather does inside is no call of the program: {told}"
        );
    });
}

/// Compiles the program of these tests with the static group library. Returns its path.
fn with_static_library(vm: &Vm) -> PathBuf {
    let prefix = vm.bed().prefix().expect("installed");
    let program = vm.home().join("pvm3/bin/LINUX64/groups-static");
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
    let done = run(gcc, END_TIMEOUT).expect("gcc");
    assert!(done.succeeded(), "{done:?}");
    program
}

/// A program with the static group library works with the shared library libpvm3.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn the_static_group_library_works() {
    on_hosts(1, |vm, _| {
        let program = with_static_library(vm);
        let mut m = start_members(vm, &program, &[1, 1]);
        let asked = m[0].send_command("collective g 0");
        assert_eq!(
            (m[1].run_command("collective g 0"), m[0].result(asked)),
            (0, 0)
        );
    });
}
