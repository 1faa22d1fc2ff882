//! Policies that an owner publishes, and policies of the administrator.

use super::{
    TIMEOUT, nice_level, permits_guests, policy_setting, wait_for_note, wait_for_status,
    wait_until_host_is_used, with_load_watchers, with_load_watchers_on,
};
use sempa_proto::event::EventKind;
use sempa_tests::owner_agent::run_owner_command_as_olga;
use sempa_tests::requirements::require_testbed_with_env;
use sempa_tests::run::run_to_end;
use sempa_tests::ssh;
use sempa_tests::testbed::{ALICE_UID, OLGA_UID};
use sempa_tests::{Vm, wait_for};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};

/// Checks that a policy with an error is refused, both by the command that publishes it and by the
/// load watcher that reads it. Returns the path of the published file.
fn check_wrong_policy_is_refused(vm: &Vm, policy_path: &Path) -> PathBuf {
    fs::write(policy_path, "leave_after = 1\nleaves = 1\n").expect("the testbed's own home");
    let olga_home = vm.testbed().folder().join("olga");
    let mut command = vm
        .testbed()
        .host(2)
        .command_as(Some(("olga", OLGA_UID, &olga_home)), "pvm");
    command.args(["owner", "policy", "rules.toml"]);
    let refused_output = run_to_end(command, TIMEOUT).expect("the console runs");
    assert!(
        !refused_output.succeeded()
            && refused_output
                .stderr
                .contains("rules.toml, line 2: unknown field `leaves`"),
        "{refused_output:?}"
    );
    let published_path = vm
        .testbed()
        .host(2)
        .machine_path("/var/tmp/sempa-owner-21002.policy.toml");
    fs::write(&published_path, "nice = 1\n\nnice = 2\n").expect("the testbed's own file");
    let error_status = wait_for_status(vm, 2, "refused", |s| {
        s["wrong"].as_array().is_some_and(|w| !w.is_empty())
    });
    let error_text = error_status["wrong"][0].as_str().unwrap_or_default();
    assert!(
        error_text.contains("sempa-owner-21002.policy.toml, line 3: duplicate key"),
        "{error_status}"
    );
    assert_eq!(
        policy_setting(&error_status, "nice").map(|(value, _)| value),
        Some("7".into()),
        "{error_status}"
    );
    published_path
}

/// An owner publishes a policy. A virtual machine of another user applies it.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn an_owner_publishes_a_policy_for_others() {
    with_load_watchers(true, 2, |vm| {
        let policy_path = vm.testbed().folder().join("olga/rules.toml");
        let publish = |text: &str| {
            fs::write(&policy_path, text).expect("the testbed's own home");
            run_owner_command_as_olga(
                vm.testbed(),
                2,
                &["policy", &policy_path.display().to_string()],
            )
        };
        publish("leave_after = 3600\nnice = 7\n");
        let applied_status = wait_for_status(vm, 2, "policy read", |s| {
            policy_setting(s, "leave_after").is_some()
        });
        let origin = "/var/tmp/sempa-owner-21002.policy.toml".to_string();
        assert_eq!(
            policy_setting(&applied_status, "leave_after"),
            Some(("3600".into(), origin)),
            "{applied_status}"
        );

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
        login.log_out().expect("logs out");
        wait_for_status(vm, 2, "free", permits_guests);
        let pid = vm
            .tasks()
            .expect("tasks")
            .iter()
            .find(|task| task.tid == guest_tid)
            .expect("it is there")
            .pid;
        wait_for(TIMEOUT, || {
            if nice_level(vm, 2, pid) >= 7 {
                Ok(())
            } else {
                Err("not nice yet".into())
            }
        })
        .expect("it is nice");

        let published_path = check_wrong_policy_is_refused(vm, &policy_path);

        publish("[blocked]\nusers = [\"alice\"]\n");
        let policy_reply = run_owner_command_as_olga(vm.testbed(), 2, &["policy"]);
        assert_eq!(
            policy_reply["policy"].as_str(),
            Some("[blocked]\nusers = [\"alice\"]\n"),
            "{policy_reply}"
        );
        // The tasks of an ordinary user cannot migrate, so they are stopped.
        let is_blocked =
            |s: &Value| s["guests"] == "stopped" && s["guests_why"] == "user 21001 is blocked here";
        wait_for_status(vm, 2, "blocked", is_blocked);
        wait_for_note(vm, "h2 accepts no guests: user 21001 is blocked here");
        assert!(
            vm.spawn_connected(&["-h2", "hold", "1"]).is_err(),
            "not even by name"
        );
        run_owner_command_as_olga(vm.testbed(), 2, &["policy", "none"]);
        wait_for_status(vm, 2, "free", permits_guests);
        assert!(!published_path.exists(), "nothing is left of it");
        wait_until_host_is_used(vm, "h2");
    });
}

/// An administrator's policy has priority over the policy file of the virtual machine's user.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_users_policy_overrides_no_administrator() {
    // Hosts share /etc of the machine, so the administrator's policy is in another folder.
    let admin_policy_path = "/var/tmp/the-administrators.toml";
    let bed = require_testbed_with_env(3, &[("SEMPA_ADMIN_POLICY", admin_policy_path)]);
    let write_admin_policy = |host: usize, text: &str| {
        let policy_path = bed.host(host).machine_path(admin_policy_path);
        fs::write(&policy_path, text).expect("the testbed's own file");
        policy_path
    };
    // The file belongs to root on h2, and to an ordinary user on h3.
    write_admin_policy(2, "cores = 1\n");
    chown(write_admin_policy(3, "cores = 99\n"), Some(ALICE_UID), None)
        .expect("the testbed's own file");
    with_load_watchers_on(&bed, true, |vm| {
        let policy_path = vm.user_home().join(".config/sempa/owner.toml");
        fs::create_dir_all(policy_path.parent().expect("a folder"))
            .expect("the testbed's own home");
        fs::write(&policy_path, "cores = 8\nidle_after_min = 3\n").expect("the testbed's own home");
        let user_origin = policy_path.display().to_string();
        let user_cores = Some(("8".to_string(), user_origin.clone()));
        let merged_status = wait_for_status(vm, 2, "read", |s| {
            policy_setting(s, "idle_after_min").is_some()
        });
        assert_eq!(
            policy_setting(&merged_status, "idle_after_min"),
            Some(("3".into(), user_origin)),
            "{merged_status}"
        );
        assert_eq!(
            policy_setting(&merged_status, "cores"),
            Some(("1".into(), admin_policy_path.into())),
            "{merged_status}"
        );
        wait_for_status(vm, 3, "hers", |s| policy_setting(s, "cores") == user_cores);
        write_admin_policy(2, "cores = 1\nowners = [\"alice\"]\n");
        wait_for_status(vm, 2, "hers", |s| policy_setting(s, "cores") == user_cores);
    });
}
