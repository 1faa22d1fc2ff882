//! Policies that an owner publishes, and those of the administrator.

use super::{
    TIMEOUT, is_free, nice_level, setting, wait_for_note, wait_for_status, wait_until_host_is_used,
    with_load_watchers, with_load_watchers_on,
};
use sempa_proto::event::EventKind;
use sempa_tests::owner_agent::run_owner_command;
use sempa_tests::requirements::testbed_with_env;
use sempa_tests::run::run;
use sempa_tests::ssh;
use sempa_tests::testbed::{ALICE_UID, OLGA_UID};
use sempa_tests::{Vm, wait_for};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};

/// A policy with an error is refused by the command that publishes it, and by the load watcher that
/// reads it. Returns the path of the published file.
fn check_wrong_policy_is_refused(vm: &Vm, file: &Path) -> PathBuf {
    fs::write(file, "leave_after = 1\nleaves = 1\n").expect("the testbed's own home");
    let home = vm.bed().folder().join("olga");
    let mut command = vm
        .bed()
        .host(2)
        .command_as(Some(("olga", OLGA_UID, &home)), "pvm");
    command.args(["owner", "policy", "rules.toml"]);
    let refused = run(command, TIMEOUT).expect("the console runs");
    assert!(
        !refused.succeeded()
            && refused
                .err
                .contains("rules.toml, line 2: unknown field `leaves`"),
        "{refused:?}"
    );
    let published = vm
        .bed()
        .host(2)
        .machine_path("/var/tmp/sempa-owner-21002.policy.toml");
    fs::write(&published, "nice = 1\n\nnice = 2\n").expect("the testbed's own file");
    let wrong = wait_for_status(vm, 2, "refused", |s| {
        s["wrong"].as_array().is_some_and(|w| !w.is_empty())
    });
    let says = wrong["wrong"][0].as_str().unwrap_or_default();
    assert!(
        says.contains("sempa-owner-21002.policy.toml, line 3: duplicate key"),
        "{wrong}"
    );
    assert_eq!(
        setting(&wrong, "nice").map(|(value, _)| value),
        Some("7".into()),
        "{wrong}"
    );
    published
}

/// An owner publishes a policy that a virtual machine of another user applies.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn an_owner_publishes_a_policy_for_others() {
    with_load_watchers(true, 2, |vm| {
        let file = vm.bed().folder().join("olga/rules.toml");
        let publish = |text: &str| {
            fs::write(&file, text).expect("the testbed's own home");
            run_owner_command(vm.bed(), 2, &["policy", &file.display().to_string()])
        };
        publish("leave_after = 3600\nnice = 7\n");
        let read = wait_for_status(vm, 2, "policy read", |s| {
            setting(s, "leave_after").is_some()
        });
        let from = "/var/tmp/sempa-owner-21002.policy.toml".to_string();
        assert_eq!(
            setting(&read, "leave_after"),
            Some(("3600".into(), from)),
            "{read}"
        );

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
        login.log_out().expect("logs out");
        wait_for_status(vm, 2, "free", is_free);
        let pid = vm
            .tasks()
            .expect("tasks")
            .iter()
            .find(|task| task.tid == guest)
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

        let published = check_wrong_policy_is_refused(vm, &file);

        publish("[blocked]\nusers = [\"alice\"]\n");
        let shown = run_owner_command(vm.bed(), 2, &["policy"]);
        assert_eq!(
            shown["policy"].as_str(),
            Some("[blocked]\nusers = [\"alice\"]\n"),
            "{shown}"
        );
        // The tasks of an ordinary user cannot migrate, so they are stopped.
        let blocked =
            |s: &Value| s["guests"] == "stopped" && s["guests_why"] == "user 21001 is blocked here";
        wait_for_status(vm, 2, "blocked", blocked);
        wait_for_note(vm, "h2 accepts no guests: user 21001 is blocked here");
        assert!(vm.spawn(&["-h2", "hold", "1"]).is_err(), "not even by name");
        run_owner_command(vm.bed(), 2, &["policy", "none"]);
        wait_for_status(vm, 2, "free", is_free);
        assert!(!published.exists(), "nothing is left of it");
        wait_until_host_is_used(vm, "h2");
    });
}

/// An administrator's policy has priority over the policy file of the virtual machine's user.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_users_policy_overrides_no_administrator() {
    // Hosts share /etc of the machine, so the administrator's policy is in another folder.
    let place = "/var/tmp/the-administrators.toml";
    let bed = testbed_with_env(3, &[("SEMPA_ADMIN_POLICY", place)]);
    let admin = |host: usize, text: &str| {
        let file = bed.host(host).machine_path(place);
        fs::write(&file, text).expect("the testbed's own file");
        file
    };
    // The file belongs to root on h2, and to a user on h3.
    admin(2, "cores = 1\n");
    chown(admin(3, "cores = 99\n"), Some(ALICE_UID), None).expect("the testbed's own file");
    with_load_watchers_on(&bed, true, |vm| {
        let file = vm.home().join(".config/sempa/owner.toml");
        fs::create_dir_all(file.parent().expect("a folder")).expect("the testbed's own home");
        fs::write(&file, "cores = 8\nidle_after_min = 3\n").expect("the testbed's own home");
        let own = file.display().to_string();
        let mine = Some(("8".to_string(), own.clone()));
        let both = wait_for_status(vm, 2, "read", |s| setting(s, "idle_after_min").is_some());
        assert_eq!(
            setting(&both, "idle_after_min"),
            Some(("3".into(), own)),
            "{both}"
        );
        assert_eq!(
            setting(&both, "cores"),
            Some(("1".into(), place.into())),
            "{both}"
        );
        wait_for_status(vm, 3, "hers", |s| setting(s, "cores") == mine);
        admin(2, "cores = 1\nowners = [\"alice\"]\n");
        wait_for_status(vm, 2, "hers", |s| setting(s, "cores") == mine);
    });
}
