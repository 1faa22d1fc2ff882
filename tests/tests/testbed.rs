//! Tests of the testbed: hosts are separate, logins are real, and no files or processes remain.

use sempa_tests::ssh::{Login, client_config};
use sempa_tests::{Testbed, requirements, utmp, wait_for};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(20);

/// Makes a testbed of `count` hosts without installed programs.
fn testbed(count: usize) -> Testbed {
    requirements::require(requirements::lacks());
    Testbed::new(count, None, &[]).expect("a testbed")
}

#[test]
#[ignore = "system tier: needs root and hosts"]
fn hosts_have_names_networks_and_folders_of_their_own() {
    let bed = testbed(2);
    for (i, host) in (1..).zip(bed.hosts()) {
        let name = host
            .shell("hostname; ls -A /tmp; cat /proc/1/comm", TIMEOUT)
            .expect("runs")
            .expect_success("ls")
            .expect("good");
        assert!(name.out.starts_with(&format!("h{i}\n")), "{name:?}");
        assert!(name.out.ends_with("sempa-host\n"), "{name:?}");
    }
    let far = bed.host(1).shell(
        "ssh -F $CONF h2 hostname"
            .replace(
                "$CONF",
                client_config(bed.folder(), "root").to_str().expect("text"),
            )
            .as_str(),
        TIMEOUT,
    );
    assert_eq!(
        far.expect("runs").expect_success("ssh").expect("good").out,
        "h2\n"
    );
}

/// A login writes a record to utmp, and the logout removes it.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn a_login_writes_a_utmp_record() {
    let bed = testbed(2);
    let host = bed.host(2);
    assert_eq!(utmp::logins(host).expect("readable"), vec![]);
    let login = Login::new(&bed, "olga", host).expect("a login");
    let seen = utmp::logins(host).expect("readable");
    assert_eq!(seen.len(), 1, "{seen:?}");
    assert_eq!(
        (seen[0].user.as_str(), seen[0].from.as_str()),
        ("olga", "10.77.0.254")
    );
    assert!(seen[0].line.starts_with("pts/"), "{seen:?}");
    assert_eq!(utmp::logins(bed.host(1)).expect("readable"), vec![]);
    login.log_out().expect("logs out");
    wait_for(TIMEOUT, || {
        if utmp::logins(host).is_ok_and(|l| l.is_empty()) {
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
    let (folder, init) = (bed.folder().to_path_buf(), bed.host(1).init_pid());
    let left = bed
        .host(1)
        .shell("sleep 1000 & setsid sleep 1000 & true", TIMEOUT);
    assert!(left.expect("runs").succeeded());
    wait_for(TIMEOUT, || {
        let sleeps = bed
            .host(1)
            .processes()
            .iter()
            .filter(|(_, line)| line == "sleep 1000")
            .count();
        if sleeps == 2 {
            Ok(())
        } else {
            Err(format!("{sleeps} processes are left behind"))
        }
    })
    .expect("they run");
    let inside: Vec<u32> = bed
        .host(1)
        .processes()
        .iter()
        .map(|(pid, _)| *pid)
        .collect();
    drop(bed);
    assert!(!folder.exists());
    for pid in inside.into_iter().chain([init]) {
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
    requirements::require(requirements::lacks());
    let mut owner = std::process::Command::new(env!("CARGO_BIN_EXE_sempa-host"))
        .args(["testbed", "1"])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut line = String::new();
    BufReader::new(owner.stdout.take().expect("piped"))
        .read_line(&mut line)
        .expect("a line");
    let (folder, host) = line.trim().split_once(' ').expect("folder and hosts");
    let init = host.strip_prefix("h1=").expect("one host");
    assert!(std::path::Path::new(folder).exists());
    owner.kill().expect("killed");
    owner.wait().expect("reaped");
    for path in [folder.to_string(), format!("/proc/{init}")] {
        let there = || {
            if std::path::Path::new(&path).exists() {
                Err(format!("{path} exists"))
            } else {
                Ok(())
            }
        };
        wait_for(TIMEOUT, there).expect("gone");
    }
}

#[test]
#[ignore = "system tier: needs root and hosts"]
fn two_testbeds_exist_at_once() {
    let first = testbed(1);
    let second = testbed(1);
    assert_ne!(first.folder(), second.folder());
    for bed in [&first, &second] {
        assert!(
            bed.desk()
                .shell("ssh -V && getent hosts h1", TIMEOUT)
                .expect("runs")
                .succeeded()
        );
    }
}
