//! Owners control guests on their machines by commands and by files. They need no rights in the
//! virtual machine.

mod published;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pvm_load_watcher::utmp;
use sempa_proto::Micros;
use sempa_proto::event::EventKind;
use sempa_proto::load::Login;
use sempa_tests::logind::{self, DesktopSession, Logind};
use sempa_tests::owner_agent::run_owner_command;
use sempa_tests::requirements::{self, testbed, testbed_with_env};
use sempa_tests::run::run;
use sempa_tests::ssh;
use sempa_tests::testbed::OLGA_UID;
use sempa_tests::vm::Settings;
use sempa_tests::{OrPanicWithLogs, Testbed, Vm, wait_for};
use serde_json::Value;
use std::fs::{self, FileTimes};
use std::os::unix::fs::chown;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const TIMEOUT: Duration = Duration::from_secs(60);

/// Waits until the owner's status of a host matches `is_so`. `what` describes this status in the
/// error. Returns the status.
fn wait_for_status(vm: &Vm, host: usize, what: &str, is_so: impl Fn(&Value) -> bool) -> Value {
    let look = || {
        let value = run_owner_command(vm.bed(), host, &["status"]);
        let mut all = value["virtual_machines"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        match all.pop() {
            Some(one) if all.is_empty() && is_so(&one) => Ok(one),
            _ => Err(format!("not {what}: {value}")),
        }
    };
    wait_for(TIMEOUT, look).or_panic_with_logs(vm)
}

/// True if guests are permitted and the owner is not certainly present. Other load on the machine
/// may look like an owner.
fn is_free(status: &Value) -> bool {
    status["owner"] != "present" && status["guests"] == "welcome"
}

/// Runs `test` on a virtual machine of `hosts` hosts with load watchers.
fn with_load_watchers(as_alice: bool, hosts: usize, test: impl FnOnce(&Vm)) {
    let bed = testbed(hosts);
    with_load_watchers_on(&bed, as_alice, test);
}

/// As [`watched`], on the hosts of an existing testbed.
fn with_load_watchers_on(bed: &Testbed, as_alice: bool, test: impl FnOnce(&Vm)) {
    let rm = Some("pvm-rm --policy load".to_string());
    let vm = Vm::start(
        bed,
        Settings {
            rm,
            as_alice,
            ..Settings::default()
        },
    )
    .expect("a virtual machine");
    let others: Vec<&str> = bed.hosts()[1..].iter().map(|host| host.name()).collect();
    vm.add(&others).expect("the others join");
    vm.compile_program("hold").expect("gcc");
    (1..=bed.hosts().len()).for_each(|host| drop(wait_for_status(&vm, host, "watched", |_| true)));
    test(&vm);
    vm.halt().expect("halts");
    let after = run_owner_command(bed, 1, &["status"]);
    assert_eq!(
        after["virtual_machines"].as_array().map(Vec::len),
        Some(0),
        "{after}"
    );
}

fn wait_until_vacated(vm: &Vm) {
    vm.wait_for_event(TIMEOUT, "clean host", |entry| {
        matches!(entry.kind, EventKind::HostVacated { .. })
    })
    .or_panic_with_logs(vm);
}

fn wait_for_note(vm: &Vm, says: &str) {
    vm.wait_for_event(TIMEOUT, says, |entry| entry.text.contains(says))
        .or_panic_with_logs(vm);
}

/// Waits until a spawned task for which no host was requested is placed on the host `wanted`.
fn wait_until_host_is_used(vm: &Vm, wanted: &str) {
    let spawn = || {
        let tid = vm
            .spawn(&["hold", "1"])
            .map_err(|error| format!("{error:#}"))?;
        let host = vm.host_of(&tid).map_err(|error| format!("{error:#}"))?;
        if host == wanted {
            Ok(())
        } else {
            Err(format!("placed on {host}"))
        }
    };
    wait_for(TIMEOUT, spawn).or_panic_with_logs(vm);
}

/// The command `here` makes guests leave the host. The command `away` permits guests although the
/// owner is logged in.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn owner_commands_here_and_away() {
    with_load_watchers(false, 2, |vm| {
        let guest = vm.spawn(&["-h2", "hold", "1"]).expect("spawned");
        let before = wait_for_status(vm, 2, "used by one task", |s| {
            s["tasks"].as_array().is_some_and(|t| t.len() == 1)
        });
        assert_eq!(
            (&before["owner"], &before["guests"], &before["user"]),
            (&"absent".into(), &"welcome".into(), &"root".into())
        );
        let task = &before["tasks"][0];
        assert_eq!(
            (task["tid"].as_str(), task["program"].as_str()),
            (Some(guest.as_str()), Some("hold")),
            "{before}"
        );
        assert!(
            task["since_us"].as_u64().is_some_and(|at| at > 0),
            "{before}"
        );

        let said = run_owner_command(vm.bed(), 2, &["here"]);
        assert_eq!(
            (said["said"].as_str(), said["until_visit"].as_bool()),
            (Some("here"), Some(true))
        );
        wait_until_vacated(vm);
        assert_eq!(vm.host_of(&guest).expect("alive"), "h1");
        let here = wait_for_status(vm, 2, "present", |s| s["owner"] == "present");
        assert_eq!(
            (&here["confidence"], &here["guests"]),
            (&100.into(), &"stopped".into())
        );
        assert!(
            here["why"]
                .as_str()
                .is_some_and(|why| why.starts_with("olga declared \"here\"")),
            "{here}"
        );
        let other = vm.spawn(&["hold", "1"]).expect("spawned");
        assert_eq!(vm.host_of(&other).expect("alive"), "h1");

        run_owner_command(vm.bed(), 2, &["auto"]);
        wait_for_status(vm, 2, "free", is_free);
        let login = ssh::Login::new(vm.bed(), "olga", vm.bed().host(2)).expect("a login");
        wait_for_status(vm, 2, "present", |s| {
            s["owner"] == "present" && s["why"].as_str().is_some_and(|w| w.contains("logged in"))
        });
        run_owner_command(vm.bed(), 2, &["away"]);
        wait_for_status(vm, 2, "absent", |s| {
            s["owner"] == "absent" && s["confidence"] == 100
        });
        wait_until_host_is_used(vm, "h2");
        // The command applies only until the owner's next login.
        let second = ssh::Login::new(vm.bed(), "olga", vm.bed().host(2)).expect("a login");
        wait_for_status(vm, 2, "present", |s| s["owner"] == "present");
        for login in [login, second] {
            login.log_out().expect("logs out");
        }
        run_owner_command(vm.bed(), 2, &["auto"]);
        assert!(
            !vm.bed()
                .host(2)
                .machine_path("/var/tmp/sempa-owner-21002.toml")
                .exists(),
            "nothing is left of the word"
        );
    });
}

/// Returns the number of processors on which a task may run.
fn allowed_processors(vm: &Vm, host: usize, tid: &str) -> usize {
    let pid = vm
        .tasks()
        .expect("tasks")
        .iter()
        .find(|task| task.tid == tid)
        .expect("it is there")
        .pid;
    let mut command = vm.bed().host(host).command("taskset");
    command.args(["-p", &pid.to_string()]);
    let told = run(command, TIMEOUT).expect("taskset runs").out;
    let mask = told
        .trim()
        .rsplit_once(' ')
        .map(|(_, mask)| mask.to_string())
        .unwrap_or_default();
    mask.chars()
        .filter_map(|digit| digit.to_digit(16))
        .map(|digit| digit.count_ones() as usize)
        .sum()
}

/// An owner limits guests to one core, then forbids guests at all hours, and withdraws both
/// settings.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn an_owner_limits_guests_and_forbids_hours() {
    with_load_watchers(false, 2, |vm| {
        run_owner_command(vm.bed(), 2, &["limit", "1", "cores"]);
        wait_for_status(vm, 2, "limited", |s| {
            s["policy"][0]["name"] == "cores" && s["policy"][0]["from"] == "pvm owner"
        });
        // The placement of a second task depends on the load, which includes that of other
        // programs.
        let first = vm.spawn(&["-h2", "hold", "1"]).expect("spawned");
        let others = (0..3).map(|_| vm.spawn(&["hold", "1"]).expect("spawned"));
        let guests: Vec<String> = std::iter::once(first).chain(others).collect();
        let there: Vec<&String> = guests
            .iter()
            .filter(|tid| vm.host_of(tid).expect("alive") == "h2")
            .collect();
        assert_eq!(there.len(), 1, "as many as the owner allows");
        let refused = vm
            .spawn(&["-h2", "hold", "1"])
            .expect_err("it is full")
            .to_string();
        assert!(
            refused.contains("resources") || refused.contains("-27"),
            "{refused}"
        );
        wait_for_note(vm, "h2: its owner allows one task, and one is present");
        let has = |host: usize, count: usize| {
            wait_for(TIMEOUT, || match allowed_processors(vm, host, there[0]) {
                all if all == count => Ok(()),
                other => Err(format!("{other} processors")),
            })
            .expect("as many processors as that")
        };
        has(2, 1);

        run_owner_command(vm.bed(), 2, &["never", "always"]);
        wait_for_note(vm, "h2 accepts no guests: the owner wants no guests always");
        wait_until_vacated(vm);
        assert_eq!(vm.host_of(there[0]).expect("alive"), "h1");
        has(1, std::thread::available_parallelism().expect("some").get());
        assert!(vm.spawn(&["-h2", "hold", "1"]).is_err(), "not even by name");
        wait_for_note(vm, "h2: no guests now (the owner wants no guests always)");
        let why = vm.pvm(&["why", "h2"]).expect("pvm").out;
        assert!(
            why.contains("Z h2 accepts no guests: the owner wants no guests always\n"),
            "{why}"
        );
        let now = "now: nothing is placed on h2: no guests now (the owner wants no guests always)";
        assert_eq!(why.lines().last(), Some(now), "{why}");

        run_owner_command(vm.bed(), 2, &["never", "none"]);
        run_owner_command(vm.bed(), 2, &["limit", "none"]);
        wait_for_note(vm, "h2 accepts guests again");
        wait_until_host_is_used(vm, "h2");
        let why = vm.pvm(&["why", "h2"]).expect("pvm").out;
        assert!(
            why.lines()
                .last()
                .is_some_and(|now| now.starts_with("now: h2 is used")),
            "{why}"
        );
    });
}

/// The owner withdraws a limit while no load watcher runs. The guest may then use all processors.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn limit_is_withdrawn_without_load_watcher() {
    with_load_watchers(false, 2, |vm| {
        let guest = vm.spawn(&["-h2", "hold", "1"]).expect("spawned");
        let has = |count: usize| {
            wait_for(TIMEOUT, || match allowed_processors(vm, 2, &guest) {
                all if all == count => Ok(()),
                other => Err(format!("{other} processors")),
            })
            .or_panic_with_logs(vm)
        };
        run_owner_command(vm.bed(), 2, &["limit", "1", "cores"]);
        has(1);
        let host = vm.bed().host(2);
        let is = |line: &str| {
            line.split(' ')
                .next()
                .is_some_and(|path| path.ends_with("pvm-load-watcher"))
        };
        let watcher = host
            .processes()
            .into_iter()
            .find(|(_, line)| is(line))
            .map(|(pid, _)| pid)
            .expect("it runs");
        let watcher = Pid::from_raw(watcher.cast_signed());
        kill(watcher, Signal::SIGSTOP).expect("it is there");
        fs::remove_file(host.machine_path("/var/tmp/sempa-owner-21002.toml"))
            .expect("the word is there");
        kill(watcher, Signal::SIGKILL).expect("it is there");
        has(std::thread::available_parallelism().expect("some").get());
    });
}

/// Guests are stopped and leave if less memory is free than the owner reserves. They return when
/// enough memory is free.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn guests_leave_the_owner_enough_memory() {
    let bed = testbed_with_env(2, &[("SEMPA_MEMINFO", "/tmp/meminfo")]);
    let has = |host: usize, gigabytes: u64| {
        let text = format!(
            "MemTotal: {} kB\nMemAvailable: {} kB\n",
            64 << 20,
            gigabytes << 20
        );
        fs::write(bed.host(host).machine_path("/tmp/meminfo"), text)
            .expect("the testbed's own folder");
    };
    has(1, 8);
    has(2, 8);
    with_load_watchers_on(&bed, false, |vm| {
        let policy = vm.home().join("mine.toml");
        fs::write(&policy, "memory_free = \"4G\"\n").expect("the testbed's own home");
        run_owner_command(vm.bed(), 2, &["policy", policy.to_str().expect("text")]);
        wait_for_status(vm, 2, "kept", |s| setting(s, "memory_free").is_some());
        let guest = vm.spawn(&["-h2", "hold", "1"]).expect("spawned");
        has(2, 3);
        let stopped = wait_for_status(vm, 2, "stopped", |s| s["guests"] == "stopped");
        assert_eq!(
            stopped["guests_why"], "less memory is free than the 4G that the owner reserves",
            "{stopped}"
        );
        wait_until_vacated(vm);
        assert_eq!(vm.host_of(&guest).expect("alive"), "h1");
        wait_for_note(
            vm,
            "h2 accepts no guests: less memory is free than the 4G that the owner reserves",
        );
        assert!(vm.spawn(&["-h2", "hold", "1"]).is_err(), "not even by name");
        has(2, 5);
        wait_for_note(vm, "h2 accepts guests again");
        wait_until_host_is_used(vm, "h2");
    });
    for host in bed.hosts() {
        fs::remove_file(host.machine_path("/tmp/meminfo")).expect("the testbed's own file");
    }
}

/// An owner without input for a long time may be absent. Input at a terminal or a keyboard makes
/// the owner present at once.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn an_idle_owner_returns_with_the_first_key() {
    let env = [
        ("SEMPA_UTMP", "/tmp/utmp"),
        ("SEMPA_TERMINALS", "/tmp/terminals"),
        ("SEMPA_INTERRUPTS", "/tmp/keys"),
    ];
    let bed = testbed_with_env(2, &env);
    let hours_ago = SystemTime::now() - Duration::from_secs(3 * 3600);
    let logged_in = |on: bool| {
        let at = Micros(u64::try_from(since_1970(hours_ago).as_micros()).expect("a time"));
        let login = Login {
            user: "olga".into(),
            line: "pts/7".into(),
            from: "there".into(),
            at,
        };
        let record = utmp::encode_record(
            if on {
                utmp::USER_PROCESS
            } else {
                utmp::DEAD_PROCESS
            },
            &login,
        );
        fs::write(bed.host(2).machine_path("/tmp/utmp"), record).expect("the testbed's own folder");
    };
    let pressed = |keys: u32| {
        let text = format!("           CPU0\n  1:  {keys}   IO-APIC   1-edge      i8042\n");
        fs::write(bed.host(2).machine_path("/tmp/keys"), text).expect("the testbed's own folder");
    };
    for host in bed.hosts() {
        fs::create_dir_all(host.machine_path("/tmp/terminals/pts"))
            .expect("the testbed's own folder");
        fs::write(host.machine_path("/tmp/utmp"), "").expect("the testbed's own folder");
    }
    let terminal = fs::File::create(bed.host(2).machine_path("/tmp/terminals/pts/7"))
        .expect("the testbed's own folder");
    let typed = |at: SystemTime| {
        terminal
            .set_times(FileTimes::new().set_accessed(at))
            .expect("it is ours")
    };
    typed(hours_ago);
    pressed(100);
    with_load_watchers_on(&bed, false, |vm| {
        let guest = vm.spawn(&["-h2", "hold", "1"]).expect("spawned");
        logged_in(true);
        let idle = wait_for_status(vm, 2, "maybe there", |s| s["owner"] == "maybe");
        assert_eq!(idle["guests"], "welcome", "{idle}");
        assert!(
            idle["why"]
                .as_str()
                .is_some_and(|why| why.contains("without input since")),
            "{idle}"
        );
        assert_eq!(
            vm.host_of(&guest).expect("alive"),
            "h2",
            "nobody needs the machine"
        );
        typed(SystemTime::now());
        let back = wait_for_status(vm, 2, "present", |s| s["owner"] == "present");
        assert_eq!(back["guests"], "stopped", "{back}");
        wait_until_vacated(vm);
        assert_eq!(vm.host_of(&guest).expect("alive"), "h1");

        logged_in(false);
        wait_for_status(vm, 2, "free", is_free);
        pressed(123);
        let keys = wait_for_status(vm, 2, "present", |s| s["owner"] == "present");
        assert_eq!(
            keys["why"], "keyboard or mouse are used without a login",
            "{keys}"
        );
    });
    for host in bed.hosts() {
        fs::remove_dir_all(host.machine_path("/tmp/terminals")).expect("the testbed's own folder");
        fs::remove_file(host.machine_path("/tmp/utmp")).expect("the testbed's own file");
    }
    fs::remove_file(bed.host(2).machine_path("/tmp/keys")).expect("the testbed's own file");
}

fn since_1970(time: SystemTime) -> Duration {
    time.duration_since(UNIX_EPOCH).expect("after 1970")
}

/// While a policy file has an error, the previous policy stays in force. A valid file takes effect
/// at once.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_wrong_policy_file_leaves_the_old_policy() {
    with_load_watchers(false, 2, |vm| {
        let file = vm.home().join(".config/sempa/owner.toml");
        fs::create_dir_all(file.parent().expect("a folder")).expect("the testbed's own home");
        let setting = |s: &Value, value: &str| {
            s["policy"]
                .as_array()
                .is_some_and(|p| p.iter().any(|p| p["value"] == value))
        };
        fs::write(
            &file,
            "leave_after = 3600\n[blocked]\nprograms = [\"no-such-*\"]\n",
        )
        .expect("the testbed's own home");
        wait_for_status(vm, 2, "policy read", |s| {
            setting(s, "3600") && setting(s, "[\"no-such-*\"]")
        });

        let guest = vm.spawn(&["-h2", "hold", "1"]).expect("spawned");
        let login = ssh::Login::new(vm.bed(), "olga", vm.bed().host(2)).expect("a login");
        let waits = wait_for_status(vm, 2, "stopped", |s| s["guests"] == "stopped");
        assert!(
            waits["leave_at_us"].as_u64().is_some_and(|at| at > 0),
            "{waits}"
        );
        vm.wait_for_event(TIMEOUT, "present owner", |entry| {
            matches!(entry.kind, EventKind::OwnerPresent { .. })
        })
        .expect("seen");
        assert_eq!(
            vm.host_of(&guest).expect("alive"),
            "h2",
            "its hour has not passed"
        );

        fs::write(&file, "leave_after = 0\nleaves = 1\n").expect("the testbed's own home");
        let wrong = wait_for_status(vm, 2, "refused", |s| {
            s["wrong"].as_array().is_some_and(|w| !w.is_empty())
        });
        let says = wrong["wrong"][0].as_str().unwrap_or_default();
        assert!(
            says.contains("owner.toml, line 2: unknown field `leaves`"),
            "{wrong}"
        );
        assert!(setting(&wrong, "3600"), "{wrong}");
        assert_eq!(
            vm.host_of(&guest).expect("alive"),
            "h2",
            "the old policy stays"
        );

        fs::write(&file, "leave_after = 0\n").expect("the testbed's own home");
        wait_until_vacated(vm);
        assert_eq!(vm.host_of(&guest).expect("alive"), "h1");
        login.log_out().expect("logs out");
    });
}

/// If the first policy has an error, no guest is permitted until the error is corrected.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn wrong_first_policy_permits_no_guest() {
    let bed = testbed(2);
    let published = bed
        .host(2)
        .machine_path("/var/tmp/sempa-owner-21002.policy.toml");
    fs::write(&published, "never = [\"always\"]\nleaves = 1\n").expect("the testbed's own file");
    chown(&published, Some(OLGA_UID), None).expect("the testbed's own file");
    with_load_watchers_on(&bed, false, |vm| {
        let shut = wait_for_status(vm, 2, "shut", |s| {
            s["wrong"].as_array().is_some_and(|w| !w.is_empty())
        });
        let why = shut["guests_why"].as_str().unwrap_or_default();
        assert!(
            why.contains("sempa-owner-21002.policy.toml, line 2: unknown field `leaves`"),
            "{shut}"
        );
        assert_eq!(
            (&shut["guests"], &shut["wrong"][0]),
            (&"stopped".into(), &shut["guests_why"]),
            "{shut}"
        );
        assert!(vm.spawn(&["-h2", "hold", "1"]).is_err(), "not even by name");
        wait_for_note(vm, "h2 accepts no guests: ");
        fs::write(&published, "nice = 1\n").expect("the testbed's own file");
        wait_for_status(vm, 2, "free", is_free);
        wait_until_host_is_used(vm, "h2");
    });
    fs::remove_file(&published).expect("the testbed's own file");
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_load_watcher_that_keeps_failing_is_reported() {
    let bed = testbed_with_env(2, &[("SEMPA_GUEST_DEFAULTS", "corse=1")]);
    let rm = Some("pvm-rm --policy load".to_string());
    let vm = Vm::start(
        &bed,
        Settings {
            rm,
            ..Settings::default()
        },
    )
    .expect("a virtual machine");
    vm.add(&["h2"]).expect("it joins");
    // The daemon of h1 has the environment of the console, which does not have this setting.
    wait_for_note(
        &vm,
        "load watcher of h2 ended soon after its start 3 times in a row",
    );
    let why = || {
        if vm.logs().contains("unknown field `corse`") {
            Ok(())
        } else {
            Err(vm.logs())
        }
    };
    wait_for(TIMEOUT, why).or_panic_with_logs(&vm);
    vm.halt().expect("halts");
}

/// Returns (value, origin) of a setting in an owner's status.
fn setting(status: &Value, name: &str) -> Option<(String, String)> {
    let one = status["policy"]
        .as_array()?
        .iter()
        .find(|one| one["name"] == name)?;
    Some((
        one["value"].as_str()?.to_string(),
        one["from"].as_str()?.to_string(),
    ))
}

/// Returns the nice level of a process.
fn nice_level(vm: &Vm, host: usize, pid: i32) -> i32 {
    let mut command = vm.bed().host(host).command("cat");
    command.arg(format!("/proc/{pid}/stat"));
    let stat = run(command, TIMEOUT).expect("cat runs").out;
    let rest = stat
        .rsplit_once(')')
        .map(|(_, rest)| rest)
        .unwrap_or_default();
    rest.split_whitespace()
        .nth(16)
        .and_then(|level| level.parse().ok())
        .unwrap_or_else(|| panic!("{stat:?}"))
}

/// The virtual machine belongs to an ordinary user. An owner's file that another user has written
/// is ignored.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn owners_need_no_rights_and_cannot_be_forged() {
    with_load_watchers(true, 2, |vm| {
        // The file has olga's name, but belongs to another user.
        let forged = vm
            .bed()
            .host(2)
            .machine_path("/var/tmp/sempa-owner-21002.toml");
        fs::write(
            &forged,
            "state = \"here\"\nat_us = 1\nuntil_us = 9999999999999999\n",
        )
        .expect("the testbed's own folder");
        chown(&forged, Some(OLGA_UID + 7), None).expect("the testbed's own file");
        let doubted = wait_for_status(vm, 2, "doubtful", |s| {
            s["wrong"].as_array().is_some_and(|w| !w.is_empty())
        });
        assert!(
            doubted["wrong"][0]
                .as_str()
                .is_some_and(|says| says.contains("not trusted")),
            "{doubted}"
        );
        assert!(is_free(&doubted) && doubted["user"] == "alice", "{doubted}");
        fs::remove_file(&forged).expect("the testbed's own file");

        run_owner_command(vm.bed(), 2, &["here", "--for", "1h"]);
        wait_for_status(vm, 2, "present", |s| s["owner"] == "present");
        vm.wait_for_event(TIMEOUT, "present owner", |entry| {
            matches!(entry.kind, EventKind::OwnerPresent { .. })
        })
        .expect("seen");
        for _ in 0..3 {
            let tid = vm.spawn(&["hold", "1"]).expect("spawned");
            assert_eq!(vm.host_of(&tid).expect("alive"), "h1");
        }
        run_owner_command(vm.bed(), 2, &["auto"]);
        wait_until_host_is_used(vm, "h2");
    });
}

/// A systemd session without a login record counts as an owner's presence.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_systemd_session_counts_as_an_owner() {
    with_load_watchers(false, 2, |vm| {
        let guest = vm.spawn(&["-h2", "hold", "1"]).expect("spawned");
        let folder = vm.bed().host(2).machine_path("/run/systemd/sessions");
        fs::create_dir_all(&folder).expect("the testbed's own folder");
        let text = "USER=olga\nCLASS=user\nTYPE=wayland\nSTATE=active\nREMOTE=0\nTTY=tty2\nREALTIME=1700000000000000\n";
        fs::write(folder.join("c1"), text).expect("the testbed's own file");
        wait_until_vacated(vm);
        assert_eq!(vm.host_of(&guest).expect("alive"), "h1");
        let here = wait_for_status(vm, 2, "present", |s| s["owner"] == "present");
        assert!(
            here["why"]
                .as_str()
                .is_some_and(|why| why.starts_with("olga is logged in on tty2")),
            "{here}"
        );
        fs::remove_file(folder.join("c1")).expect("the testbed's own file");
        wait_for_status(vm, 2, "free", is_free);
        wait_until_host_is_used(vm, "h2");
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and dbus-daemon"]
fn logind_shows_whether_desktops_are_used() {
    let bed = testbed(2);
    requirements::require(logind::lacks());
    let logind = Logind::start(bed.host(2)).expect("a bus");
    let desk = |idle, locked| DesktopSession {
        user: "olga".into(),
        idle,
        idle_since: 1_700_000_000_000_000,
        locked,
    };
    with_load_watchers_on(&bed, false, |vm| {
        let says = |s: &Value, what: &str| {
            let sources = s["sources"].as_array().expect("a list");
            sources.iter().any(|one| {
                one[0] == "screens" && one[1].as_str().is_some_and(|says| says.contains(what))
            })
        };
        wait_for_status(vm, 2, "asked", |s| says(s, "no session has a screen"));
        let guest = vm.spawn(&["-h2", "hold", "1"]).expect("spawned");
        logind
            .set_session(Some(desk(false, false)))
            .expect("the bus is there");
        wait_until_vacated(vm);
        assert_eq!(vm.host_of(&guest).expect("alive"), "h1");
        let here = wait_for_status(vm, 2, "present", |s| {
            s["owner"] == "present" && says(s, "tty2 in use")
        });
        assert!(
            here["why"]
                .as_str()
                .is_some_and(|why| why.starts_with("olga is logged in on tty2")),
            "{here}"
        );

        logind
            .set_session(Some(desk(true, false)))
            .expect("the bus is there");
        let idle = wait_for_status(vm, 2, "idle", |s| {
            s["owner"] == "maybe" && says(s, "tty2 without input")
        });
        assert!(
            idle["why"]
                .as_str()
                .is_some_and(|why| why.contains("without input since")),
            "{idle}"
        );
        logind
            .set_session(Some(desk(false, true)))
            .expect("the bus is there");
        wait_for_status(vm, 2, "locked", |s| says(s, "tty2 without input"));
        logind
            .set_session(Some(desk(false, false)))
            .expect("the bus is there");
        wait_for_status(vm, 2, "used again", |s| {
            s["owner"] == "present" && says(s, "tty2 in use")
        });

        logind.set_session(None).expect("the bus is there");
        wait_for_status(vm, 2, "free", is_free);
        wait_until_host_is_used(vm, "h2");
        logind.end().expect("it ends");
        wait_for_status(vm, 2, "without logind", |s| {
            says(s, "logind cannot be queried")
        });
    });
}

/// The owner's status shows how guests are stopped, and if not by control groups, for which reason.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn status_shows_how_guests_are_stopped() {
    let bed = testbed(2);
    let rm = Some("pvm-rm --policy load".to_string());
    // The setting applies only to h1, because the daemon of h2 has the environment of the remote
    // shell.
    let env = vec![("SEMPA_FREEZER".to_string(), "off".to_string())];
    let vm = Vm::start(
        &bed,
        Settings {
            rm,
            env,
            ..Settings::default()
        },
    )
    .expect("a virtual machine");
    vm.add(&["h2"]).expect("it joins");
    let first = wait_for_status(&vm, 1, "known", |s| s["stopped_by"] != "unknown");
    assert_eq!(
        (
            first["stopped_by"].as_str(),
            first["stopped_by_why"].as_str()
        ),
        (Some("signals"), Some("SEMPA_FREEZER=off")),
        "{first}"
    );
    let second = wait_for_status(&vm, 2, "known", |s| s["stopped_by"] != "unknown");
    let why = second["stopped_by_why"].as_str().expect("a text");
    match second["stopped_by"].as_str() {
        Some("control groups") => assert_eq!(why, ""),
        Some("signals") => assert!(
            !why.is_empty() && !why.contains("SEMPA_FREEZER"),
            "{second}"
        ),
        _ => panic!("{second}"),
    }
    let mut shown = bed.host(1).command("pvm");
    shown.arg("owner");
    let shown = run(shown, TIMEOUT).expect("the console runs");
    assert!(
        shown
            .out
            .lines()
            .any(|line| line.trim() == "stopped   by signals: SEMPA_FREEZER=off"),
        "{shown:?}"
    );
    vm.halt().expect("halts");
}
