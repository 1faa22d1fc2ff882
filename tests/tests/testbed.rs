//! Tests of the testbed: hosts are separate, logins are real, and no files or processes remain.

use sempa_tests::ssh::{SshLogin, client_config_path};
use sempa_tests::{Testbed, requirements, utmp, wait_for};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(20);

/// Makes a testbed of `host_count` hosts on which no programs of Sempa are installed.
fn testbed(host_count: usize) -> Testbed {
    requirements::panic_if_unmet(requirements::unmet_requirement());
    Testbed::new(host_count, None, &[]).expect("a testbed")
}

#[test]
#[ignore = "system tier: needs root and hosts"]
fn hosts_have_names_networks_and_folders_of_their_own() {
    let bed = testbed(2);
    for (i, host) in (1..).zip(bed.hosts()) {
        let shell_output = host
            .run_shell("hostname; ls -A /tmp; cat /proc/1/comm", TIMEOUT)
            .expect("runs")
            .expect_success("ls")
            .expect("good");
        assert!(
            shell_output.stdout.starts_with(&format!("h{i}\n")),
            "{shell_output:?}"
        );
        assert!(
            shell_output.stdout.ends_with("sempa-host\n"),
            "{shell_output:?}"
        );
    }
    let ssh_output = bed.host(1).run_shell(
        "ssh -F $CONF h2 hostname"
            .replace(
                "$CONF",
                client_config_path(bed.folder(), "root")
                    .to_str()
                    .expect("text"),
            )
            .as_str(),
        TIMEOUT,
    );
    assert_eq!(
        ssh_output
            .expect("runs")
            .expect_success("ssh")
            .expect("good")
            .stdout,
        "h2\n"
    );
}

/// A login writes a record to utmp, and the logout removes it.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn a_login_writes_a_utmp_record() {
    let bed = testbed(2);
    let host = bed.host(2);
    assert_eq!(utmp::read_logins(host).expect("readable"), vec![]);
    let login = SshLogin::log_in(&bed, "olga", host).expect("a login");
    let records = utmp::read_logins(host).expect("readable");
    assert_eq!(records.len(), 1, "{records:?}");
    assert_eq!(
        (records[0].user.as_str(), records[0].remote_host.as_str()),
        ("olga", "10.77.0.254")
    );
    assert!(records[0].terminal.starts_with("pts/"), "{records:?}");
    assert_eq!(utmp::read_logins(bed.host(1)).expect("readable"), vec![]);
    login.log_out().expect("logs out");
    wait_for(TIMEOUT, || {
        if utmp::read_logins(host).is_ok_and(|l| l.is_empty()) {
            Ok(())
        } else {
            Err("record stays".into())
        }
    })
    .expect("no record");
}

#[test]
#[ignore = "system tier: needs root and hosts"]
fn ended_testbed_leaves_nothing() {
    let bed = testbed(1);
    let (folder, init_pid) = (bed.folder().to_path_buf(), bed.host(1).init_pid());
    let shell_output = bed
        .host(1)
        .run_shell("sleep 1000 & setsid sleep 1000 & true", TIMEOUT);
    assert!(shell_output.expect("runs").succeeded());
    wait_for(TIMEOUT, || {
        let sleep_count = bed
            .host(1)
            .processes()
            .iter()
            .filter(|(_, line)| line == "sleep 1000")
            .count();
        if sleep_count == 2 {
            Ok(())
        } else {
            Err(format!("{sleep_count} processes are left behind"))
        }
    })
    .expect("they run");
    let pids: Vec<u32> = bed
        .host(1)
        .processes()
        .iter()
        .map(|(pid, _)| *pid)
        .collect();
    drop(bed);
    assert!(!folder.exists());
    for pid in pids.into_iter().chain([init_pid]) {
        let path = format!("/proc/{pid}");
        wait_for(TIMEOUT, || {
            if std::path::Path::new(&path).exists() {
                Err(format!("{path} exists"))
            } else {
                Ok(())
            }
        })
        .expect("gone");
    }
}

#[test]
#[ignore = "system tier: needs root and hosts"]
fn killed_testbed_leaves_nothing() {
    use std::io::{BufRead, BufReader};
    requirements::panic_if_unmet(requirements::unmet_requirement());
    let mut testbed_process = std::process::Command::new(env!("CARGO_BIN_EXE_sempa-host"))
        .args(["testbed", "1"])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut line = String::new();
    BufReader::new(testbed_process.stdout.take().expect("piped"))
        .read_line(&mut line)
        .expect("a line");
    let (folder, host) = line.trim().split_once(' ').expect("folder and hosts");
    let init_pid = host.strip_prefix("h1=").expect("one host");
    assert!(std::path::Path::new(folder).exists());
    testbed_process.kill().expect("killed");
    testbed_process.wait().expect("reaped");
    for path in [folder.to_string(), format!("/proc/{init_pid}")] {
        let check_removed = || {
            if std::path::Path::new(&path).exists() {
                Err(format!("{path} exists"))
            } else {
                Ok(())
            }
        };
        wait_for(TIMEOUT, check_removed).expect("gone");
    }
}

#[test]
#[ignore = "system tier: needs root and hosts"]
fn two_testbeds_exist_at_once() {
    let first_bed = testbed(1);
    let second_bed = testbed(1);
    assert_ne!(first_bed.folder(), second_bed.folder());
    for bed in [&first_bed, &second_bed] {
        assert!(
            bed.outside_host()
                .run_shell("ssh -V && getent hosts h1", TIMEOUT)
                .expect("runs")
                .succeeded()
        );
    }
}
