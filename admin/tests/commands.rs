//! Runs each command of the program as root and as an ordinary user, with wrong inputs, and with
//! files that must not be trusted.

use serde_json::Value;
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

/// Uid and gid of an ordinary user.
const USER_ID: u32 = 65534;
const USAGE: i32 = 64;
const NOT_ROOT: i32 = 77;

/// A directory with the program and its files. Nothing of the machine is changed.
struct Bench {
    dir: TempDir,
}

impl Bench {
    fn new() -> Self {
        assert!(
            nix::unistd::geteuid().is_root(),
            "cannot run here: it needs root"
        );
        let dir = tempfile::tempdir().expect("a directory");
        set_mode(dir.path(), 0o755);
        // Other users may not reach the folder of the build.
        fs::copy(
            env!("CARGO_BIN_EXE_pvm-admin"),
            dir.path().join("pvm-admin"),
        )
        .expect("a copy");
        Self { dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn command(&self, line: &str) -> Command {
        let mut command = Command::new(self.path("pvm-admin"));
        command
            .args(line.split_whitespace())
            .env("SEMPA_SITE_KEY", self.path("site.key"))
            .env("SEMPA_SERVICE_SETTINGS", self.path("service.toml"))
            .env("SEMPA_TASKERD", self.path("no.sock"))
            .env("SEMPA_OWNER_WORDS", self.dir.path())
            .env_remove("SUDO_USER");
        command
    }

    fn run(&self, line: &str) -> Finished {
        Finished::of(&mut self.command(line))
    }

    fn run_as_user(&self, line: &str) -> Finished {
        let mut command = self.command(line);
        command.uid(USER_ID).gid(USER_ID);
        Finished::of(&mut command)
    }

    /// Runs a command that must succeed, and returns its JSON value.
    fn json(&self, line: &str) -> Value {
        let finished = self.run(line);
        assert_eq!(finished.status, 0, "{line}: {finished:?}");
        serde_json::from_str(&finished.stdout).unwrap_or_else(|e| panic!("{line}: {e}"))
    }

    fn key_id(&self) -> String {
        let value = self.json("site-key show --json");
        value["key_id"].as_str().expect("an identifier").to_string()
    }
}

#[derive(Debug)]
struct Finished {
    status: i32,
    stdout: String,
    stderr: String,
}

impl Finished {
    fn of(command: &mut Command) -> Self {
        let Output {
            status,
            stdout,
            stderr,
        } = command.output().expect("the program runs");
        Self {
            status: status.code().expect("no signal"),
            stdout: String::from_utf8(stdout).expect("text"),
            stderr: String::from_utf8(stderr).expect("text"),
        }
    }

    /// Asserts that the program has failed with this status and one line that contains `part`.
    fn assert_refused(&self, status: i32, part: &str) {
        assert_eq!(self.status, status, "{self:?}");
        assert!(self.stderr.contains(part), "{part}: {self:?}");
        assert!(self.stdout.is_empty(), "{self:?}");
        if status != USAGE {
            assert_eq!(self.stderr.lines().count(), 1, "{self:?}");
        }
    }
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).expect("the test's own file");
}

/// A key is created once, rotated, and its previous keys are forgotten. The file stays readable by
/// root only, and no output contains the key.
#[test]
#[ignore = "system tier: needs root"]
fn site_key_is_created_rotated_and_forgotten() {
    let bench = Bench::new();
    bench
        .run("site-key show")
        .assert_refused(1, "site-key create");
    bench
        .run("site-key rotate")
        .assert_refused(1, "there is no site key");
    let created = bench.run("site-key create");
    let first_id = bench.key_id();
    assert!(created.stdout.contains(&first_id), "{created:?}");
    bench
        .run("site-key create")
        .assert_refused(1, "there is already a site key");
    assert_eq!(bench.key_id(), first_id, "an existing key is not replaced");
    let rotated = bench.run("site-key rotate");
    let second_id = bench.key_id();
    assert_ne!(second_id, first_id);
    let previous = &bench.json("site-key show --json")["previous_key_ids"];
    assert_eq!(previous, &serde_json::json!([first_id]));
    let key_text = fs::read_to_string(bench.path("site.key")).expect("a file");
    let keys: Vec<&str> = key_text
        .lines()
        .filter_map(|line| {
            line.strip_prefix("current ")
                .or(line.strip_prefix("previous "))
        })
        .collect();
    assert_eq!(keys.len(), 2);
    let shown = bench.run("site-key show").stdout;
    for output in [&created.stdout, &rotated.stdout, &shown] {
        assert!(
            keys.iter().all(|key| !output.contains(&key[..16])),
            "{output}"
        );
    }
    assert_eq!(bench.run("site-key forget-previous").status, 0);
    assert_eq!(bench.key_id(), second_id);
    let previous = &bench.json("site-key show --json")["previous_key_ids"];
    assert_eq!(previous, &serde_json::json!([]));
    let mode = fs::metadata(bench.path("site.key"))
        .expect("a file")
        .permissions()
        .mode();
    assert_eq!(mode & 0o7777, 0o600);
}

/// A key that another user may have read or replaced is not used.
#[test]
#[ignore = "system tier: needs root"]
fn untrusted_site_keys_are_refused() {
    let bench = Bench::new();
    assert_eq!(bench.run("site-key create").status, 0);
    let key = bench.path("site.key");
    set_mode(&key, 0o644);
    bench.run("site-key show").assert_refused(1, "mode 0644");
    bench.run("site-key rotate").assert_refused(1, "mode 0644");
    set_mode(&key, 0o600);
    chown(&key, Some(USER_ID), None).expect("root may");
    bench
        .run("site-key show")
        .assert_refused(1, "belongs to user 65534");
    chown(&key, Some(0), None).expect("root may");
    fs::rename(&key, bench.path("real.key")).expect("the test's own file");
    symlink(bench.path("real.key"), &key).expect("a link");
    bench
        .run("site-key show")
        .assert_refused(1, "symbolic link");
    bench.run("site-key create").assert_refused(1, "already");
    fs::remove_file(&key).expect("the test's own link");
    fs::write(&key, "garbage\n").expect("the test's own file");
    set_mode(&key, 0o600);
    bench.run("site-key show").assert_refused(1, "is not valid");
    set_mode(bench.dir.path(), 0o777);
    bench.run("site-key show").assert_refused(1, "mode 0777");
}

/// Commands for root say so in one line and change nothing. The others work with what the user may
/// see.
#[test]
#[ignore = "system tier: needs root"]
fn ordinary_users_change_nothing() {
    let bench = Bench::new();
    for line in [
        "site-key create",
        "site-key show --json",
        "site-key rotate",
        "site-key forget-previous",
        "drain --no-wait",
        "drain --off",
        "limits --set tasks=3",
        "limits alice --deny",
    ] {
        bench
            .run_as_user(line)
            .assert_refused(NOT_ROOT, "is for root only, because");
    }
    let entries = fs::read_dir(bench.dir.path()).expect("a directory");
    assert_eq!(entries.count(), 1, "only the program is there");
    let limits = bench.run_as_user("limits --json");
    assert_eq!(limits.status, 0, "{limits:?}");
    let status = bench.run_as_user("status --json");
    let status: Value = serde_json::from_str(&status.stdout).expect("a value");
    assert_eq!(status["service"]["state"], "absent");
    let doctor = bench.run_as_user("doctor");
    assert!(doctor.stdout.contains("you are not root"), "{doctor:?}");
}

#[test]
#[ignore = "system tier: needs root"]
fn wrong_command_lines_have_their_own_status() {
    let bench = Bench::new();
    for (line, part) in [
        ("", "Usage"),
        ("destroy", "unrecognized subcommand"),
        ("site-key", "Usage"),
        ("site-key create now", "unexpected argument"),
        ("drain --off --reason x", "cannot be used with"),
        ("limits --set tasks", "expected KEY=VALUE"),
        ("doctor -- -oProxyCommand=id", "expected the name of a host"),
    ] {
        bench.run(line).assert_refused(USAGE, part);
    }
    let help = bench.run("--help");
    assert_eq!(help.status, 0);
    for command in ["site-key", "status", "doctor", "drain", "limits"] {
        assert!(help.stdout.contains(command), "{help:?}");
    }
    assert!(!help.stdout.contains("probe"), "{help:?}");
    assert!(bench.run("--version").stdout.starts_with("pvm-admin "));
}

/// Limits are changed, comments stay, and wrong values change nothing.
#[test]
#[ignore = "system tier: needs root"]
fn limits_are_shown_and_changed() {
    let bench = Bench::new();
    let file = bench.path("service.toml");
    fs::write(&file, "# ours\ntasks = 9 # few\n").expect("the test's own file");
    assert_eq!(bench.json("limits --json")["limits"]["tasks"], "9");
    let changed = bench.run("limits nobody --set memory=2G tasks=4");
    assert_eq!(changed.status, 0, "{changed:?}");
    assert!(
        changed
            .stdout
            .contains("a tasker reads the settings when it starts")
    );
    let value = bench.json("limits nobody --json");
    assert_eq!(
        (&value["limits"]["memory"], &value["limits"]["tasks"]),
        (&"2G".into(), &"4".into())
    );
    assert_eq!(
        bench
            .run("limits --group staff --set image_bytes=1G")
            .status,
        0
    );
    assert_eq!(bench.run("limits mallory --deny").status, 0);
    assert_eq!(bench.json("limits mallory --json")["denied"], true);
    let text = fs::read_to_string(&file).expect("a file");
    assert!(text.starts_with("# ours\ntasks = 9 # few\n"), "{text}");
    bench
        .run("limits --set tasks=0")
        .assert_refused(1, "expected a number from 1 to 100000");
    bench
        .run("limits --set taks=5")
        .assert_refused(1, "unknown setting");
    assert_eq!(fs::read_to_string(&file).expect("a file"), text);
}

/// Malformed settings, and those that another user may have written, are neither used nor changed.
#[test]
#[ignore = "system tier: needs root"]
fn untrusted_settings_are_refused() {
    let bench = Bench::new();
    let file = bench.path("service.toml");
    for (text, part) in [
        ("tasks = \"many\"\n", "line 1: tasks: expected a number"),
        ("\nfoo = 1\n", "line 2: unknown key"),
        ("\u{0}\u{1}[[[", "line 1"),
    ] {
        fs::write(&file, text).expect("the test's own file");
        bench.run("limits").assert_refused(1, part);
        bench
            .run("limits --set tasks=3")
            .assert_refused(1, "nothing was changed");
        assert_eq!(fs::read_to_string(&file).expect("a file"), text);
        let doctor = bench.run("doctor");
        assert_eq!(doctor.status, 2, "{doctor:?}");
        assert!(
            doctor
                .stdout
                .contains(&format!("FAILURE  settings: {}", file.display()))
        );
    }
    fs::write(&file, "tasks = 3\n").expect("the test's own file");
    set_mode(&file, 0o666);
    bench.run("limits").assert_refused(1, "mode 0666");
    set_mode(&file, 0o644);
    fs::rename(&file, bench.path("real.toml")).expect("the test's own file");
    symlink(bench.path("real.toml"), &file).expect("a link");
    bench.run("limits").assert_refused(1, "symbolic link");
    bench
        .run("limits --set tasks=5")
        .assert_refused(1, "symbolic link");
    let text = fs::read_to_string(bench.path("real.toml")).expect("a file");
    assert_eq!(text, "tasks = 3\n");
}

/// A drain is recorded together with what root has stated before, and removed again.
#[test]
#[ignore = "system tier: needs root"]
fn drain_is_recorded_and_removed() {
    let bench = Bench::new();
    let file = bench.path("sempa-owner-0.toml");
    fs::write(&file, "cores = 3\n").expect("the test's own file");
    set_mode(&file, 0o644);
    let mut command = bench.command("drain --no-wait --reason");
    let drained = Finished::of(command.arg("new \"disks\"\u{1b}"));
    assert_eq!(drained.status, 0, "{drained:?}");
    // Load watchers of other virtual machines on this machine need not answer.
    let status = || {
        let value: Value = serde_json::from_str(&bench.run("status --json").stdout).expect("JSON");
        value["drained"].clone()
    };
    assert_eq!(status(), "new \"disks\"?");
    assert_eq!(bench.run("drain --off").status, 0);
    assert_eq!(status(), Value::Null);
    let text = fs::read_to_string(&file).expect("root's other settings");
    assert!(
        text.contains("cores = 3") && !text.contains("drain"),
        "{text}"
    );
    assert_eq!(bench.run("drain --persistent --no-wait").status, 0);
    assert!(
        !fs::read_to_string(&file)
            .expect("a file")
            .contains("boot_id")
    );
    assert_eq!(status(), "");
    fs::write(&file, "cores = many\n").expect("the test's own file");
    bench
        .run("drain --no-wait")
        .assert_refused(1, "nothing was changed");
    assert_eq!(fs::read_to_string(&file).expect("a file"), "cores = many\n");
}

/// A program in the place of ssh that runs the commands of the doctor on this machine, except for
/// the host `away`.
const FAKE_SSH: &str = "#!/bin/sh
if [ \"$1\" = -G ]; then echo hostname 127.0.0.1; exit; fi
while [ \"$1\" != -- ]; do shift; done
host=$2; shift 2
if [ \"$host\" = away ]; then echo 'ssh: no route to away' >&2; exit 255; fi
exec sh -c \"$*\"
";

/// The doctor compares this machine with others, and names the command that must succeed for one
/// that ssh does not reach.
#[test]
#[ignore = "system tier: needs root"]
fn doctor_examines_other_hosts() {
    let bench = Bench::new();
    assert_eq!(bench.run("site-key create").status, 0);
    let ssh = bench.path("ssh");
    fs::write(&ssh, FAKE_SSH).expect("the test's own file");
    set_mode(&ssh, 0o755);
    let path = std::env::var("PATH").expect("a search path");
    let mut command = bench.command("doctor --json near away");
    command.env("PATH", format!("{}:{path}", bench.dir.path().display()));
    let finished = Finished::of(&mut command);
    assert_eq!(finished.status, 2, "{finished:?}");
    let findings: Vec<Value> = serde_json::from_str(&finished.stdout).expect("a list");
    let of = |subject: &str| {
        let of_subject = findings
            .iter()
            .filter(|finding| finding["subject"] == subject);
        of_subject.cloned().collect::<Vec<_>>()
    };
    let near = of("near");
    assert!(
        near.iter().all(|finding| finding["level"] == "ok"),
        "{near:?}"
    );
    for part in [
        "has version",
        "clock",
        "same uids",
        "same site key",
        "a datagram to it works",
    ] {
        let is_found = |finding: &Value| {
            finding["sentence"]
                .as_str()
                .is_some_and(|s| s.contains(part))
        };
        assert!(near.iter().any(is_found), "{part}: {near:?}");
    }
    let away = of("away");
    assert_eq!(away.len(), 1, "{away:?}");
    assert_eq!(away[0]["level"], "failure");
    assert_eq!(
        away[0]["advice"],
        "make this command succeed: ssh -o BatchMode=yes away true"
    );
    let service = of("service");
    assert_eq!(
        service[0]["level"], "failure",
        "there is no service: {service:?}"
    );
}

/// The trial of the doctor dumps and restores a process, and leaves nothing behind.
#[test]
#[ignore = "system tier: needs root and CRIU"]
fn doctor_tries_the_engine() {
    let bench = Bench::new();
    let images = bench.path("tmp");
    fs::create_dir(&images).expect("the test's own directory");
    let mut command = bench.command("doctor --json");
    let finished = Finished::of(command.env("TMPDIR", &images));
    let findings: Vec<Value> = serde_json::from_str(&finished.stdout).expect("a list");
    for (subject, part) in [
        (
            "CRIU",
            "dump and restore of a process in namespaces of its own works",
        ),
        ("namespaces", "entering the namespaces of a task works"),
        ("namespaces", "mounting /proc in a task's namespaces works"),
        ("namespaces", "(ns_last_pid) works"),
    ] {
        let is_found = |finding: &Value| {
            finding["subject"] == subject
                && finding["sentence"]
                    .as_str()
                    .is_some_and(|s| s.contains(part))
        };
        assert!(findings.iter().any(is_found), "{part}: {findings:?}");
    }
    assert_eq!(fs::read_dir(&images).expect("a directory").count(), 0);
}
