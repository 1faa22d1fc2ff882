//! Owners control guests on their machines by commands and by files. Owners need no rights in the
//! virtual machine.

mod published;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pvm_load_watcher::utmp;
use sempa_proto::Micros;
use sempa_proto::event::EventKind;
use sempa_proto::load::Login;
use sempa_tests::logind::{self, DesktopSession, FakeLogind};
use sempa_tests::owner_agent::run_owner_command_as_olga;
use sempa_tests::requirements::{self, require_testbed, require_testbed_with_env};
use sempa_tests::run::run_to_end;
use sempa_tests::ssh;
use sempa_tests::testbed::OLGA_UID;
use sempa_tests::vm::VmSettings;
use sempa_tests::{OrPanicWithLogs, Testbed, Vm, wait_for};
use serde_json::Value;
use std::fs::{self, FileTimes};
use std::os::unix::fs::chown;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const TIMEOUT: Duration = Duration::from_secs(60);

/// Waits until the owner's status of a host matches `is_expected`. `description` describes this
/// status in the error. Returns the status.
fn wait_for_status(
    vm: &Vm,
    host: usize,
    description: &str,
    is_expected: impl Fn(&Value) -> bool,
) -> Value {
    let check = || {
        let owner_reply = run_owner_command_as_olga(vm.testbed(), host, &["status"]);
        let mut machines = owner_reply["virtual_machines"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        match machines.pop() {
            Some(status) if machines.is_empty() && is_expected(&status) => Ok(status),
            _ => Err(format!("not {description}: {owner_reply}")),
        }
    };
    wait_for(TIMEOUT, check).or_panic_with_logs(vm)
}

/// True if guests are permitted and the owner is not certainly present. Other programs that use the
/// machine may count as a possible owner.
fn permits_guests(status: &Value) -> bool {
    status["owner"] != "present" && status["guests"] == "welcome"
}

/// Runs `test` on a virtual machine of `host_count` hosts with load watchers.
fn with_load_watchers(is_alice: bool, host_count: usize, test: impl FnOnce(&Vm)) {
    let bed = require_testbed(host_count);
    with_load_watchers_on(&bed, is_alice, test);
}

/// As [`with_load_watchers`], on the hosts of an existing testbed. After the end of the virtual
/// machine the owner's status of h1 must contain no virtual machine.
fn with_load_watchers_on(bed: &Testbed, is_alice: bool, test: impl FnOnce(&Vm)) {
    let rm = Some("pvm-rm --policy load".to_string());
    let vm = Vm::start(
        bed,
        VmSettings {
            rm_command: rm,
            runs_as_alice: is_alice,
            ..VmSettings::default()
        },
    )
    .expect("a virtual machine");
    let other_hosts: Vec<&str> = bed.hosts()[1..].iter().map(|host| host.name()).collect();
    vm.add_hosts(&other_hosts).expect("the others join");
    vm.compile_program("hold").expect("gcc");
    (1..=bed.hosts().len()).for_each(|host| drop(wait_for_status(&vm, host, "watched", |_| true)));
    test(&vm);
    vm.halt_and_wait().expect("halts");
    let final_status = run_owner_command_as_olga(bed, 1, &["status"]);
    assert_eq!(
        final_status["virtual_machines"].as_array().map(Vec::len),
        Some(0),
        "{final_status}"
    );
}

fn wait_until_vacated(vm: &Vm) {
    vm.wait_for_event(TIMEOUT, "clean host", |entry| {
        matches!(entry.kind, EventKind::HostVacated { .. })
    })
    .or_panic_with_logs(vm);
}

fn wait_for_note(vm: &Vm, text: &str) {
    vm.wait_for_event(TIMEOUT, text, |entry| entry.text.contains(text))
        .or_panic_with_logs(vm);
}

/// Waits until a spawned task for which no host was requested is placed on the host
/// `expected_host`.
fn wait_until_host_is_used(vm: &Vm, expected_host: &str) {
    let spawn_on_host = || {
        let tid = vm
            .spawn_connected(&["hold", "1"])
            .map_err(|error| format!("{error:#}"))?;
        let host = vm.host_of(&tid).map_err(|error| format!("{error:#}"))?;
        if host == expected_host {
            Ok(())
        } else {
            Err(format!("placed on {host}"))
        }
    };
    wait_for(TIMEOUT, spawn_on_host).or_panic_with_logs(vm);
}

/// The command `here` makes guests leave the host. The command `away` permits guests although the
/// owner is logged in.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn here_and_away_decide_whether_guests_are_permitted() {
    with_load_watchers(false, 2, |vm| {
        let guest_tid = vm.spawn_connected(&["-h2", "hold", "1"]).expect("spawned");
        let used_status = wait_for_status(vm, 2, "used by one task", |s| {
            s["tasks"].as_array().is_some_and(|t| t.len() == 1)
        });
        assert_eq!(
            (
                &used_status["owner"],
                &used_status["guests"],
                &used_status["user"]
            ),
            (&"absent".into(), &"welcome".into(), &"root".into())
        );
        let task = &used_status["tasks"][0];
        assert_eq!(
            (task["tid"].as_str(), task["program"].as_str()),
            (Some(guest_tid.as_str()), Some("hold")),
            "{used_status}"
        );
        assert!(
            task["since_us"].as_u64().is_some_and(|at| at > 0),
            "{used_status}"
        );

        let owner_reply = run_owner_command_as_olga(vm.testbed(), 2, &["here"]);
        assert_eq!(
            (
                owner_reply["said"].as_str(),
                owner_reply["until_visit"].as_bool()
            ),
            (Some("here"), Some(true))
        );
        wait_until_vacated(vm);
        assert_eq!(vm.host_of(&guest_tid).expect("alive"), "h1");
        let present_status = wait_for_status(vm, 2, "present", |s| s["owner"] == "present");
        assert_eq!(
            (&present_status["confidence"], &present_status["guests"]),
            (&100.into(), &"stopped".into())
        );
        assert!(
            present_status["why"]
                .as_str()
                .is_some_and(|why| why.starts_with("olga declared \"here\"")),
            "{present_status}"
        );
        let second_guest_tid = vm.spawn_connected(&["hold", "1"]).expect("spawned");
        assert_eq!(vm.host_of(&second_guest_tid).expect("alive"), "h1");

        run_owner_command_as_olga(vm.testbed(), 2, &["auto"]);
        wait_for_status(vm, 2, "free", permits_guests);
        let login =
            ssh::SshLogin::log_in(vm.testbed(), "olga", vm.testbed().host(2)).expect("a login");
        wait_for_status(vm, 2, "present", |s| {
            s["owner"] == "present" && s["why"].as_str().is_some_and(|w| w.contains("logged in"))
        });
        run_owner_command_as_olga(vm.testbed(), 2, &["away"]);
        wait_for_status(vm, 2, "absent", |s| {
            s["owner"] == "absent" && s["confidence"] == 100
        });
        wait_until_host_is_used(vm, "h2");
        // The command `away` applies only until the owner's next login.
        let second_login =
            ssh::SshLogin::log_in(vm.testbed(), "olga", vm.testbed().host(2)).expect("a login");
        wait_for_status(vm, 2, "present", |s| s["owner"] == "present");
        for login in [login, second_login] {
            login.log_out().expect("logs out");
        }
        run_owner_command_as_olga(vm.testbed(), 2, &["auto"]);
        assert!(
            !vm.testbed()
                .host(2)
                .machine_path("/var/tmp/sempa-owner-21002.toml")
                .exists(),
            "nothing is left of the word"
        );
    });
}

/// Returns the number of processors of `host` on which a task may run.
fn allowed_processor_count(vm: &Vm, host: usize, tid: &str) -> usize {
    let pid = vm
        .tasks()
        .expect("tasks")
        .iter()
        .find(|task| task.tid == tid)
        .expect("it is there")
        .pid;
    let mut command = vm.testbed().host(host).root_command("taskset");
    command.args(["-p", &pid.to_string()]);
    let taskset_output = run_to_end(command, TIMEOUT).expect("taskset runs").stdout;
    let mask = taskset_output
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
        run_owner_command_as_olga(vm.testbed(), 2, &["limit", "1", "cores"]);
        wait_for_status(vm, 2, "limited", |s| {
            s["policy"][0]["name"] == "cores" && s["policy"][0]["from"] == "pvm owner"
        });
        // Only the first guest is requested on h2. The placement of the other guests depends on the
        // load of all programs.
        let first_guest_tid = vm.spawn_connected(&["-h2", "hold", "1"]).expect("spawned");
        let other_guests = (0..3).map(|_| vm.spawn_connected(&["hold", "1"]).expect("spawned"));
        let guest_tids: Vec<String> = std::iter::once(first_guest_tid)
            .chain(other_guests)
            .collect();
        let guests_on_h2: Vec<&String> = guest_tids
            .iter()
            .filter(|tid| vm.host_of(tid).expect("alive") == "h2")
            .collect();
        assert_eq!(guests_on_h2.len(), 1, "as many as the owner allows");
        let spawn_error = vm
            .spawn_connected(&["-h2", "hold", "1"])
            .expect_err("it is full")
            .to_string();
        assert!(
            spawn_error.contains("resources") || spawn_error.contains("-27"),
            "{spawn_error}"
        );
        wait_for_note(vm, "h2: its owner allows one task, and one is present");
        let wait_for_processor_count = |host: usize, count: usize| {
            wait_for(TIMEOUT, || {
                match allowed_processor_count(vm, host, guests_on_h2[0]) {
                    processor_count if processor_count == count => Ok(()),
                    other => Err(format!("{other} processors")),
                }
            })
            .expect("as many processors as that")
        };
        wait_for_processor_count(2, 1);

        run_owner_command_as_olga(vm.testbed(), 2, &["never", "always"]);
        wait_for_note(vm, "h2 accepts no guests: the owner wants no guests always");
        wait_until_vacated(vm);
        assert_eq!(vm.host_of(guests_on_h2[0]).expect("alive"), "h1");
        wait_for_processor_count(1, std::thread::available_parallelism().expect("some").get());
        assert!(
            vm.spawn_connected(&["-h2", "hold", "1"]).is_err(),
            "not even by name"
        );
        wait_for_note(vm, "h2: no guests now (the owner wants no guests always)");
        let why_output = vm.run_pvm(&["why", "h2"]).expect("pvm").stdout;
        assert!(
            why_output.contains(" h2 accepts no guests: the owner wants no guests always\n"),
            "{why_output}"
        );
        let last_line =
            "now: nothing is placed on h2: no guests now (the owner wants no guests always)";
        assert_eq!(why_output.lines().last(), Some(last_line), "{why_output}");

        run_owner_command_as_olga(vm.testbed(), 2, &["never", "none"]);
        run_owner_command_as_olga(vm.testbed(), 2, &["limit", "none"]);
        wait_for_note(vm, "h2 accepts guests again");
        wait_until_host_is_used(vm, "h2");
        let why_output = vm.run_pvm(&["why", "h2"]).expect("pvm").stdout;
        assert!(
            why_output
                .lines()
                .last()
                .is_some_and(|last_line| last_line.starts_with("now: h2 is used")),
            "{why_output}"
        );
    });
}

/// The owner withdraws a limit while no load watcher runs. The guest may then use all processors.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn limit_is_withdrawn_without_load_watcher() {
    with_load_watchers(false, 2, |vm| {
        let guest_tid = vm.spawn_connected(&["-h2", "hold", "1"]).expect("spawned");
        let wait_for_processor_count = |count: usize| {
            wait_for(TIMEOUT, || {
                match allowed_processor_count(vm, 2, &guest_tid) {
                    processor_count if processor_count == count => Ok(()),
                    other => Err(format!("{other} processors")),
                }
            })
            .or_panic_with_logs(vm)
        };
        run_owner_command_as_olga(vm.testbed(), 2, &["limit", "1", "cores"]);
        wait_for_processor_count(1);
        let host = vm.testbed().host(2);
        let is_load_watcher = |line: &str| {
            line.split(' ')
                .next()
                .is_some_and(|path| path.ends_with("pvm-load-watcher"))
        };
        let watcher_pid = host
            .processes()
            .into_iter()
            .find(|(_, line)| is_load_watcher(line))
            .map(|(pid, _)| pid)
            .expect("it runs");
        let watcher_pid = Pid::from_raw(watcher_pid.cast_signed());
        kill(watcher_pid, Signal::SIGSTOP).expect("it is there");
        fs::remove_file(host.machine_path("/var/tmp/sempa-owner-21002.toml"))
            .expect("the word is there");
        kill(watcher_pid, Signal::SIGKILL).expect("it is there");
        wait_for_processor_count(std::thread::available_parallelism().expect("some").get());
    });
}

/// Guests are stopped and leave if less memory is free than the owner reserves. The host accepts
/// guests again when enough memory is free.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn guests_leave_the_owner_enough_memory() {
    let bed = require_testbed_with_env(2, &[("SEMPA_MEMINFO", "/tmp/meminfo")]);
    let set_available_memory = |host: usize, available_gib: u64| {
        let text = format!(
            "MemTotal: {} kB\nMemAvailable: {} kB\n",
            64 << 20,
            available_gib << 20
        );
        fs::write(bed.host(host).machine_path("/tmp/meminfo"), text)
            .expect("the testbed's own folder");
    };
    set_available_memory(1, 8);
    set_available_memory(2, 8);
    with_load_watchers_on(&bed, false, |vm| {
        let policy_path = vm.user_home().join("mine.toml");
        fs::write(&policy_path, "memory_free = \"4G\"\n").expect("the testbed's own home");
        run_owner_command_as_olga(
            vm.testbed(),
            2,
            &["policy", policy_path.to_str().expect("text")],
        );
        wait_for_status(vm, 2, "kept", |s| {
            policy_setting(s, "memory_free").is_some()
        });
        let guest_tid = vm.spawn_connected(&["-h2", "hold", "1"]).expect("spawned");
        set_available_memory(2, 3);
        let stopped_status = wait_for_status(vm, 2, "stopped", |s| s["guests"] == "stopped");
        assert_eq!(
            stopped_status["guests_why"], "less memory is free than the 4G that the owner reserves",
            "{stopped_status}"
        );
        wait_until_vacated(vm);
        assert_eq!(vm.host_of(&guest_tid).expect("alive"), "h1");
        wait_for_note(
            vm,
            "h2 accepts no guests: less memory is free than the 4G that the owner reserves",
        );
        assert!(
            vm.spawn_connected(&["-h2", "hold", "1"]).is_err(),
            "not even by name"
        );
        set_available_memory(2, 5);
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
    let bed = require_testbed_with_env(2, &env);
    let three_hours_ago = SystemTime::now() - Duration::from_secs(3 * 3600);
    let write_login_record = |is_login: bool| {
        let at = Micros(u64::try_from(since_1970(three_hours_ago).as_micros()).expect("a time"));
        let login = Login {
            user_name: "olga".into(),
            terminal: "pts/7".into(),
            origin: "there".into(),
            at,
        };
        let record = utmp::encode_record(
            if is_login {
                utmp::USER_PROCESS
            } else {
                utmp::DEAD_PROCESS
            },
            &login,
        );
        fs::write(bed.host(2).machine_path("/tmp/utmp"), record).expect("the testbed's own folder");
    };
    let write_key_interrupt_count = |keys: u32| {
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
    let set_input_time = |at: SystemTime| {
        terminal
            .set_times(FileTimes::new().set_accessed(at))
            .expect("it is ours")
    };
    set_input_time(three_hours_ago);
    write_key_interrupt_count(100);
    with_load_watchers_on(&bed, false, |vm| {
        let guest_tid = vm.spawn_connected(&["-h2", "hold", "1"]).expect("spawned");
        write_login_record(true);
        let idle_status = wait_for_status(vm, 2, "maybe there", |s| s["owner"] == "maybe");
        assert_eq!(idle_status["guests"], "welcome", "{idle_status}");
        assert!(
            idle_status["why"]
                .as_str()
                .is_some_and(|why| why.contains("without input since")),
            "{idle_status}"
        );
        assert_eq!(
            vm.host_of(&guest_tid).expect("alive"),
            "h2",
            "nobody needs the machine"
        );
        set_input_time(SystemTime::now());
        let present_status = wait_for_status(vm, 2, "present", |s| s["owner"] == "present");
        assert_eq!(present_status["guests"], "stopped", "{present_status}");
        wait_until_vacated(vm);
        assert_eq!(vm.host_of(&guest_tid).expect("alive"), "h1");

        write_login_record(false);
        wait_for_status(vm, 2, "free", permits_guests);
        write_key_interrupt_count(123);
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
        let policy_path = vm.user_home().join(".config/sempa/owner.toml");
        fs::create_dir_all(policy_path.parent().expect("a folder"))
            .expect("the testbed's own home");
        let has_value = |s: &Value, value: &str| {
            s["policy"]
                .as_array()
                .is_some_and(|p| p.iter().any(|p| p["value"] == value))
        };
        fs::write(
            &policy_path,
            "leave_after = 3600\n[blocked]\nprograms = [\"no-such-*\"]\n",
        )
        .expect("the testbed's own home");
        wait_for_status(vm, 2, "policy read", |s| {
            has_value(s, "3600") && has_value(s, "[\"no-such-*\"]")
        });

        let guest_tid = vm.spawn_connected(&["-h2", "hold", "1"]).expect("spawned");
        let login =
            ssh::SshLogin::log_in(vm.testbed(), "olga", vm.testbed().host(2)).expect("a login");
        let stopped_status = wait_for_status(vm, 2, "stopped", |s| s["guests"] == "stopped");
        assert!(
            stopped_status["leave_at_us"]
                .as_u64()
                .is_some_and(|at| at > 0),
            "{stopped_status}"
        );
        vm.wait_for_event(TIMEOUT, "present owner", |entry| {
            matches!(entry.kind, EventKind::OwnerPresent { .. })
        })
        .expect("seen");
        assert_eq!(
            vm.host_of(&guest_tid).expect("alive"),
            "h2",
            "its hour has not passed"
        );

        fs::write(&policy_path, "leave_after = 0\nleaves = 1\n").expect("the testbed's own home");
        let error_status = wait_for_status(vm, 2, "refused", |s| {
            s["wrong"].as_array().is_some_and(|w| !w.is_empty())
        });
        let error_text = error_status["wrong"][0].as_str().unwrap_or_default();
        assert!(
            error_text.contains("owner.toml, line 2: unknown field `leaves`"),
            "{error_status}"
        );
        assert!(has_value(&error_status, "3600"), "{error_status}");
        assert_eq!(
            vm.host_of(&guest_tid).expect("alive"),
            "h2",
            "the old policy stays"
        );

        fs::write(&policy_path, "leave_after = 0\n").expect("the testbed's own home");
        wait_until_vacated(vm);
        assert_eq!(vm.host_of(&guest_tid).expect("alive"), "h1");
        login.log_out().expect("logs out");
    });
}

/// If the first policy has an error, no guest is permitted until the error is corrected.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn wrong_first_policy_permits_no_guest() {
    let bed = require_testbed(2);
    let policy_path = bed
        .host(2)
        .machine_path("/var/tmp/sempa-owner-21002.policy.toml");
    fs::write(&policy_path, "never = [\"always\"]\nleaves = 1\n").expect("the testbed's own file");
    chown(&policy_path, Some(OLGA_UID), None).expect("the testbed's own file");
    with_load_watchers_on(&bed, false, |vm| {
        let stopped_status = wait_for_status(vm, 2, "shut", |s| {
            s["wrong"].as_array().is_some_and(|w| !w.is_empty())
        });
        let reason = stopped_status["guests_why"].as_str().unwrap_or_default();
        assert!(
            reason.contains("sempa-owner-21002.policy.toml, line 2: unknown field `leaves`"),
            "{stopped_status}"
        );
        assert_eq!(
            (&stopped_status["guests"], &stopped_status["wrong"][0]),
            (&"stopped".into(), &stopped_status["guests_why"]),
            "{stopped_status}"
        );
        assert!(
            vm.spawn_connected(&["-h2", "hold", "1"]).is_err(),
            "not even by name"
        );
        wait_for_note(vm, "h2 accepts no guests: ");
        fs::write(&policy_path, "nice = 1\n").expect("the testbed's own file");
        wait_for_status(vm, 2, "free", permits_guests);
        wait_until_host_is_used(vm, "h2");
    });
    fs::remove_file(&policy_path).expect("the testbed's own file");
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_load_watcher_that_keeps_failing_is_reported() {
    let bed = require_testbed_with_env(2, &[("SEMPA_GUEST_DEFAULTS", "corse=1")]);
    let rm = Some("pvm-rm --policy load".to_string());
    let vm = Vm::start(
        &bed,
        VmSettings {
            rm_command: rm,
            ..VmSettings::default()
        },
    )
    .expect("a virtual machine");
    vm.add_hosts(&["h2"]).expect("it joins");
    // The daemon of h1 has the environment of the console, which does not have this setting.
    wait_for_note(
        &vm,
        "load watcher of h2 ended soon after its start 3 times in a row",
    );
    let check_error_logged = || {
        if vm.events_and_logs().contains("unknown field `corse`") {
            Ok(())
        } else {
            Err(vm.events_and_logs())
        }
    };
    wait_for(TIMEOUT, check_error_logged).or_panic_with_logs(&vm);
    vm.halt_and_wait().expect("halts");
}

/// Returns (value, origin) of a setting in an owner's status; `None` if the policy does not contain
/// the setting.
fn policy_setting(status: &Value, name: &str) -> Option<(String, String)> {
    let entry = status["policy"]
        .as_array()?
        .iter()
        .find(|entry| entry["name"] == name)?;
    Some((
        entry["value"].as_str()?.to_string(),
        entry["from"].as_str()?.to_string(),
    ))
}

/// Returns the nice level of a process of `host`, from its `stat` file.
fn nice_level(vm: &Vm, host: usize, pid: i32) -> i32 {
    let mut command = vm.testbed().host(host).root_command("cat");
    command.arg(format!("/proc/{pid}/stat"));
    let stat = run_to_end(command, TIMEOUT).expect("cat runs").stdout;
    let rest = stat
        .rsplit_once(')')
        .map(|(_, rest)| rest)
        .unwrap_or_default();
    rest.split_whitespace()
        .nth(16)
        .and_then(|level| level.parse().ok())
        .unwrap_or_else(|| panic!("{stat:?}"))
}

/// The virtual machine belongs to an ordinary user. The owner's commands take effect although the
/// owner has no rights in the virtual machine. A file with such commands is ignored if it belongs
/// to another user.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn owners_need_no_rights_and_cannot_be_forged() {
    with_load_watchers(true, 2, |vm| {
        // The file has olga's name, but belongs to another user.
        let forged_path = vm
            .testbed()
            .host(2)
            .machine_path("/var/tmp/sempa-owner-21002.toml");
        fs::write(
            &forged_path,
            "state = \"here\"\nat_us = 1\nuntil_us = 9999999999999999\n",
        )
        .expect("the testbed's own folder");
        chown(&forged_path, Some(OLGA_UID + 7), None).expect("the testbed's own file");
        // The load watcher answers this command after it has read the folder again.
        run_owner_command_as_olga(vm.testbed(), 2, &["auto"]);
        let status = wait_for_status(vm, 2, "free", permits_guests);
        assert!(
            status["user"] == "alice" && status["wrong"].as_array().is_none_or(Vec::is_empty),
            "{status}"
        );

        run_owner_command_as_olga(vm.testbed(), 2, &["here", "--for", "1h"]);
        wait_for_status(vm, 2, "present", |s| s["owner"] == "present");
        vm.wait_for_event(TIMEOUT, "present owner", |entry| {
            matches!(entry.kind, EventKind::OwnerPresent { .. })
        })
        .expect("seen");
        for _ in 0..3 {
            let tid = vm.spawn_connected(&["hold", "1"]).expect("spawned");
            assert_eq!(vm.host_of(&tid).expect("alive"), "h1");
        }
        run_owner_command_as_olga(vm.testbed(), 2, &["auto"]);
        wait_until_host_is_used(vm, "h2");
    });
}

/// A systemd session without a login record counts as an owner's presence.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_systemd_session_counts_as_an_owner() {
    with_load_watchers(false, 2, |vm| {
        let guest_tid = vm.spawn_connected(&["-h2", "hold", "1"]).expect("spawned");
        let folder = vm.testbed().host(2).machine_path("/run/systemd/sessions");
        fs::create_dir_all(&folder).expect("the testbed's own folder");
        let session_text = "USER=olga\nCLASS=user\nTYPE=wayland\nSTATE=active\nREMOTE=0\nTTY=tty2\nREALTIME=1700000000000000\n";
        fs::write(folder.join("c1"), session_text).expect("the testbed's own file");
        wait_until_vacated(vm);
        assert_eq!(vm.host_of(&guest_tid).expect("alive"), "h1");
        let present_status = wait_for_status(vm, 2, "present", |s| s["owner"] == "present");
        assert!(
            present_status["why"]
                .as_str()
                .is_some_and(|why| why.starts_with("olga is logged in on tty2")),
            "{present_status}"
        );
        fs::remove_file(folder.join("c1")).expect("the testbed's own file");
        wait_for_status(vm, 2, "free", permits_guests);
        wait_until_host_is_used(vm, "h2");
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and dbus-daemon"]
fn logind_shows_whether_desktops_are_used() {
    let bed = require_testbed(2);
    requirements::panic_if_unmet(logind::unmet_requirement());
    let logind = FakeLogind::start(bed.host(2)).expect("a bus");
    let desktop_session = |idle, locked| DesktopSession {
        user: "olga".into(),
        is_idle: idle,
        idle_changed_us: 1_700_000_000_000_000,
        is_locked: locked,
    };
    with_load_watchers_on(&bed, false, |vm| {
        let mentions = |s: &Value, text: &str| {
            let sources = s["sources"].as_array().expect("a list");
            sources.iter().any(|source| {
                source[0] == "screens"
                    && source[1]
                        .as_str()
                        .is_some_and(|mentions| mentions.contains(text))
            })
        };
        wait_for_status(vm, 2, "asked", |s| mentions(s, "no session has a screen"));
        let guest_tid = vm.spawn_connected(&["-h2", "hold", "1"]).expect("spawned");
        logind
            .set_session(Some(desktop_session(false, false)))
            .expect("the bus is there");
        wait_until_vacated(vm);
        assert_eq!(vm.host_of(&guest_tid).expect("alive"), "h1");
        let present_status = wait_for_status(vm, 2, "present", |s| {
            s["owner"] == "present" && mentions(s, "tty2 in use")
        });
        assert!(
            present_status["why"]
                .as_str()
                .is_some_and(|why| why.starts_with("olga is logged in on tty2")),
            "{present_status}"
        );

        logind
            .set_session(Some(desktop_session(true, false)))
            .expect("the bus is there");
        let idle = wait_for_status(vm, 2, "idle", |s| {
            s["owner"] == "maybe" && mentions(s, "tty2 without input")
        });
        assert!(
            idle["why"]
                .as_str()
                .is_some_and(|why| why.contains("without input since")),
            "{idle}"
        );
        logind
            .set_session(Some(desktop_session(false, true)))
            .expect("the bus is there");
        wait_for_status(vm, 2, "locked", |s| mentions(s, "tty2 without input"));
        logind
            .set_session(Some(desktop_session(false, false)))
            .expect("the bus is there");
        wait_for_status(vm, 2, "used again", |s| {
            s["owner"] == "present" && mentions(s, "tty2 in use")
        });

        logind.set_session(None).expect("the bus is there");
        wait_for_status(vm, 2, "free", permits_guests);
        wait_until_host_is_used(vm, "h2");
        logind.stop().expect("it ends");
        wait_for_status(vm, 2, "without logind", |s| {
            mentions(s, "logind cannot be queried")
        });
    });
}

/// The owner's status shows how guests are stopped. If they are not stopped by control groups, the
/// status contains the reason.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn status_shows_how_guests_are_stopped() {
    let bed = require_testbed(2);
    let rm = Some("pvm-rm --policy load".to_string());
    // The setting applies only to h1, because the daemon of h2 has the environment of the remote
    // shell.
    let env = vec![("SEMPA_FREEZER".to_string(), "off".to_string())];
    let vm = Vm::start(
        &bed,
        VmSettings {
            rm_command: rm,
            env,
            ..VmSettings::default()
        },
    )
    .expect("a virtual machine");
    vm.add_hosts(&["h2"]).expect("it joins");
    let h1_status = wait_for_status(&vm, 1, "known", |s| s["stopped_by"] != "unknown");
    assert_eq!(
        (
            h1_status["stopped_by"].as_str(),
            h1_status["stopped_by_why"].as_str()
        ),
        (Some("signals"), Some("SEMPA_FREEZER=off")),
        "{h1_status}"
    );
    let h2_status = wait_for_status(&vm, 2, "known", |s| s["stopped_by"] != "unknown");
    let reason = h2_status["stopped_by_why"].as_str().expect("a text");
    match h2_status["stopped_by"].as_str() {
        Some("control groups") => assert_eq!(reason, ""),
        Some("signals") => assert!(
            !reason.is_empty() && !reason.contains("SEMPA_FREEZER"),
            "{h2_status}"
        ),
        _ => panic!("{h2_status}"),
    }
    let mut owner_command = bed.host(1).root_command("pvm");
    owner_command.arg("owner");
    let owner_command = run_to_end(owner_command, TIMEOUT).expect("the console runs");
    assert!(
        owner_command
            .stdout
            .lines()
            .any(|line| line.trim() == "stopped   by signals: SEMPA_FREEZER=off"),
        "{owner_command:?}"
    );
    vm.halt_and_wait().expect("halts");
}
