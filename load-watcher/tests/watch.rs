//! Tests the watches of login records, terminals and settings with real files and the real kernel,
//! and samples of /proc with fixed and real files.

use pvm_load_watcher::file_watcher::{FileWatcher, WatchedPath, read_login_records};
use pvm_load_watcher::owner::LoginRecords;
use pvm_load_watcher::sampler::{MEMORY_AGE_MAX, Sampler};
use pvm_load_watcher::utmp::{DEAD_PROCESS, USER_PROCESS, UTMP_RECORD_BYTES, encode_record};
use sempa_proto::Micros;
use sempa_proto::load::Login;
use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Time limit of every wait, long enough for a loaded machine.
const WAIT_TIMEOUT: Duration = Duration::from_secs(20);

fn alice_login() -> Login {
    Login {
        user_name: "alice".into(),
        terminal: "pts/0".into(),
        origin: "h9".into(),
        at: Micros::from_secs(1000),
    }
}

fn write_record(path: &Path, record_type: i16) {
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)
        .expect("the test's own file");
    file.write_all_at(&encode_record(record_type, &alice_login()), 0)
        .expect("the test's own file");
}

/// A file with login records, and the watcher of the file.
struct WatchedLoginFile {
    path: PathBuf,
    watcher: FileWatcher,
}

impl WatchedLoginFile {
    fn new(path: PathBuf) -> Self {
        Self {
            watcher: FileWatcher::new(vec![WatchedPath::file(path.clone())]),
            path,
        }
    }

    fn read_records(&mut self) -> LoginRecords {
        self.watcher.set_missing_watches(0);
        read_login_records(&self.path)
    }

    /// Waits at most for `timeout`. Returns true if the login records may have changed during the
    /// wait.
    fn wait_for_change(&mut self, timeout: Duration) -> bool {
        self.watcher.wait(timeout, None).path_changed(0)
    }

    fn is_unwatched(&self) -> bool {
        self.watcher.is_unwatched(0)
    }
}

/// Waits until the login records equal `expected_records`. Fails the test after [`WAIT_TIMEOUT`].
fn wait_for_records(login_file: &mut WatchedLoginFile, expected_records: &LoginRecords) {
    let deadline = Instant::now() + WAIT_TIMEOUT;
    loop {
        let current_records = login_file.read_records();
        if current_records == *expected_records {
            return;
        }
        let remaining_time = deadline.saturating_duration_since(Instant::now());
        assert!(
            login_file.wait_for_change(remaining_time),
            "still {current_records:?}, not {expected_records:?}"
        );
    }
}

#[test]
fn login_and_logout_are_noticed_without_polling() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("utmp");
    write_record(&path, DEAD_PROCESS);
    let mut login_file = WatchedLoginFile::new(path.clone());
    wait_for_records(&mut login_file, &LoginRecords::Logins(Vec::new()));
    for _ in 0..3 {
        write_record(&path, USER_PROCESS);
        assert!(login_file.wait_for_change(WAIT_TIMEOUT));
        wait_for_records(&mut login_file, &LoginRecords::Logins(vec![alice_login()]));
        write_record(&path, DEAD_PROCESS);
        assert!(login_file.wait_for_change(WAIT_TIMEOUT));
        wait_for_records(&mut login_file, &LoginRecords::Logins(Vec::new()));
    }
    assert!(!login_file.is_unwatched());
}

#[test]
fn created_replaced_and_removed_files_are_noticed() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("utmp");
    let mut login_file = WatchedLoginFile::new(path.clone());
    assert_eq!(login_file.read_records(), LoginRecords::Missing);
    write_record(&path, USER_PROCESS);
    wait_for_records(&mut login_file, &LoginRecords::Logins(vec![alice_login()]));
    let replacement_path = dir.path().join("other");
    write_record(&replacement_path, DEAD_PROCESS);
    fs::rename(&replacement_path, &path).expect("the test's own file");
    wait_for_records(&mut login_file, &LoginRecords::Logins(Vec::new()));
    // The new file at the path is watched instead of the file that it has replaced.
    write_record(&path, USER_PROCESS);
    wait_for_records(&mut login_file, &LoginRecords::Logins(vec![alice_login()]));
    fs::remove_file(&path).expect("the test's own file");
    wait_for_records(&mut login_file, &LoginRecords::Missing);
    write_record(&path, USER_PROCESS);
    wait_for_records(&mut login_file, &LoginRecords::Logins(vec![alice_login()]));
}

/// A directory that is created later is watched from the next retry. Until the retry, the login
/// records in the directory must be read periodically.
#[test]
fn late_directory_is_watched_from_next_retry() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("run/utmp");
    let mut login_file = WatchedLoginFile::new(path.clone());
    assert!(login_file.is_unwatched());
    let must_read_results = [0; 4].map(|_| login_file.watcher.retry_watch(0));
    assert_eq!(
        must_read_results,
        [true, true, false, false],
        "without its folder it says nothing"
    );
    fs::create_dir(dir.path().join("run")).expect("the test's own directory");
    assert!(login_file.watcher.retry_watch(0));
    assert!(!login_file.is_unwatched() && !login_file.watcher.retry_watch(0));
    write_record(&path, USER_PROCESS);
    wait_for_records(&mut login_file, &LoginRecords::Logins(vec![alice_login()]));
    fs::remove_dir_all(dir.path().join("run")).expect("the test's own directory");
    wait_for_records(&mut login_file, &LoginRecords::Missing);
    while !login_file.is_unwatched() {
        assert!(login_file.wait_for_change(WAIT_TIMEOUT));
    }
    assert_eq!(login_file.read_records(), LoginRecords::Missing);
    assert!(
        login_file.is_unwatched() && login_file.watcher.retry_watch(0),
        "it is read once more"
    );
}

/// A change of an unwatched file does not end a wait for a file in the same directory.
#[test]
fn other_files_in_directory_cause_no_wake() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut login_file = WatchedLoginFile::new(dir.path().join("utmp"));
    File::create(dir.path().join("other")).expect("the test's own file");
    assert!(!login_file.wait_for_change(Duration::ZERO));
}

/// The watcher reports a change only for the changed path, although the kernel reports all changes
/// in one directory through one watch.
#[test]
fn change_is_reported_for_its_path_only() {
    let dir = tempfile::tempdir().expect("a directory");
    let path_of = |name: &str| dir.path().join(name);
    // The third path is a directory that contains the first two. The kernel watches this directory
    // only once.
    let mut watcher = FileWatcher::new(vec![
        WatchedPath::file(path_of("a")),
        WatchedPath::file(path_of("b")),
        WatchedPath::dir(path_of(""), "word-"),
    ]);
    let mut write_and_get_changes = |name: &str| {
        fs::write(path_of(name), "x").expect("the test's own file");
        let wake_reasons = watcher.wait(WAIT_TIMEOUT, None);
        (0..3).for_each(|i| watcher.set_missing_watches(i));
        // All further events of the same write are discarded.
        while watcher.wait(Duration::ZERO, None).any_change() {}
        [
            wake_reasons.path_changed(0),
            wake_reasons.path_changed(1),
            wake_reasons.path_changed(2),
        ]
    };
    assert_eq!(write_and_get_changes("a"), [true, false, false]);
    assert_eq!(write_and_get_changes("b"), [false, true, false]);
    assert_eq!(write_and_get_changes("word-7"), [false, false, true]);
    assert_eq!(write_and_get_changes("b"), [false, true, false]);
}

/// A key at a watched idle terminal ends the wait at once. A key at a terminal that is not watched
/// is ignored.
#[test]
fn key_at_an_idle_terminal_is_noticed_at_once() {
    let (idle_terminal, unlisted_terminal) = (
        nix::pty::openpty(None, None).expect("a terminal"),
        nix::pty::openpty(None, None).expect("one"),
    );
    let terminal_path =
        |pty: &nix::pty::OpenptyResult| nix::unistd::ttyname(&pty.slave).expect("it has a name");
    let mut watcher = FileWatcher::new(Vec::new());
    watcher.watch_idle_terminals(&BTreeSet::from([terminal_path(&idle_terminal)]));
    let press_key = |pty: &nix::pty::OpenptyResult| {
        nix::unistd::write(&pty.master, b"x\n").expect("there is room");
        nix::unistd::read(&pty.slave, &mut [0; 8]).expect("a line");
    };
    press_key(&unlisted_terminal);
    assert!(!watcher.wait(Duration::ZERO, None).any_change());
    press_key(&idle_terminal);
    assert!(watcher.wait(WAIT_TIMEOUT, None).terminal_used());
    watcher.watch_idle_terminals(&BTreeSet::new());
    while watcher.wait(Duration::ZERO, None).any_change() {}
    press_key(&idle_terminal);
    assert!(!watcher.wait(Duration::ZERO, None).any_change());
}

/// A change of a settings file is reported only after the writer has closed the file.
#[test]
fn settings_are_read_after_the_writer_closes() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("owner.toml");
    fs::write(&path, "cores = 2\n").expect("the test's own file");
    let mut watcher = FileWatcher::new(vec![WatchedPath::settings(path.clone())]);
    let file = OpenOptions::new()
        .write(true)
        .truncate(true)
        .open(&path)
        .expect("the test's own file");
    file.write_all_at(b"cores = 3\n", 0)
        .expect("the test's own file");
    assert!(!watcher.wait(Duration::ZERO, None).any_change());
    drop(file);
    assert!(watcher.wait(WAIT_TIMEOUT, None).path_changed(0));
}

#[test]
fn additional_descriptor_ends_wait() {
    let (read_fd, write_fd) = nix::unistd::pipe().expect("a pipe");
    let mut watcher = FileWatcher::new(Vec::new());
    assert!(
        !watcher
            .wait(Duration::ZERO, Some(read_fd.as_fd()))
            .additional_fd_ready
    );
    nix::unistd::write(&write_fd, b"x").expect("there is room");
    assert!(
        watcher
            .wait(WAIT_TIMEOUT, Some(read_fd.as_fd()))
            .additional_fd_ready
    );
}

/// If the login records cannot be read, the result contains the system's error text.
#[test]
fn unreadable_records_contain_reason() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut login_file = WatchedLoginFile::new(dir.path().to_path_buf());
    assert!(
        matches!(login_file.read_records(), LoginRecords::Unreadable(reason) if reason.contains("directory"))
    );
}

#[test]
fn incomplete_record_is_ignored_until_complete() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("utmp");
    let complete_record = encode_record(USER_PROCESS, &alice_login());
    fs::write(&path, &complete_record[..UTMP_RECORD_BYTES / 2]).expect("the test's own file");
    let mut login_file = WatchedLoginFile::new(path.clone());
    assert_eq!(login_file.read_records(), LoginRecords::Logins(Vec::new()));
    fs::write(&path, complete_record).expect("the test's own file");
    wait_for_records(&mut login_file, &LoginRecords::Logins(vec![alice_login()]));
}

/// If an owner reserves memory, samples read memory and pressure alternately.
#[test]
fn reserved_memory_alternates_with_pressure() {
    let dir = tempfile::tempdir().expect("a directory");
    let write_file = |name: &str, text: &str| {
        fs::write(dir.path().join(name), text).expect("the test's own file")
    };
    fs::create_dir(dir.path().join("pressure")).expect("the test's own directory");
    write_file("stat", "cpu 100 0 0 100 0 0 0 0\ncpu0 1\nintr 0\n");
    write_file("loadavg", "1.50 1 1 3/100 7\n");
    let write_memory_and_pressure = |value: u64| {
        write_file(
            "meminfo",
            &format!("MemTotal: 99 kB\nMemAvailable: {value} kB\n"),
        );
        write_file(
            "pressure/cpu",
            &format!("some avg10={value}.00 avg60=0.00 avg300=0.00 total=0\n"),
        );
    };
    write_memory_and_pressure(1);
    let mut sampler = Sampler::open(dir.path()).expect("all files are there");
    let mut memory_and_pressure = |value: u64, memory_matters: bool| {
        write_memory_and_pressure(value);
        sampler.set_memory_matters(memory_matters);
        let memory_and_pressure = sampler.sample(Micros(value)).expect("all files are good");
        (
            memory_and_pressure.available_bytes >> 10,
            (memory_and_pressure.cpu_pressure * 100.0).round() as u64,
        )
    };
    assert_eq!(memory_and_pressure(2, false), (2, 2));
    assert_eq!(memory_and_pressure(3, false), (2, 3), "nobody keeps it");
    assert_eq!(
        [4, 5, 6, 7].map(|value| memory_and_pressure(value, true)),
        [(4, 3), (4, 5), (6, 5), (6, 7)]
    );
    assert_eq!(
        [8, 9].map(|value| memory_and_pressure(value, false)),
        [(6, 8), (6, 9)]
    );
}

/// The load comes from the CPU account of the outermost control group, because the account of an
/// inner group contains only a part of the load.
#[test]
fn load_comes_from_the_outermost_control_group() {
    let dir = tempfile::tempdir().expect("a directory");
    let write_file = |name: &str, text: &str| {
        fs::write(dir.path().join(name), text).expect("the test's own file")
    };
    for dir_name in ["self", "groups"] {
        fs::create_dir(dir.path().join(dir_name)).expect("the test's own directory");
    }
    write_file(
        "self/mountinfo",
        &format!(
            "9 8 0:1 / {} rw - cgroup2 cgroup2 rw\n",
            dir.path().join("groups").display()
        ),
    );
    write_file("groups/cgroup.procs", "");
    write_file("groups/cpu.stat", "usage_usec 1000\n");
    write_file("stat", "cpu 100 0 0 100 0 0 0 0\ncpu0 1\ncpu1 1\nintr 0\n");
    write_file("loadavg", "1.00 1 1 3/100 7\n");
    write_file("meminfo", "MemTotal: 8 kB\nMemAvailable: 4 kB\n");
    let mut sampler = Sampler::open(dir.path()).expect("all files are there");
    sampler.sample(Micros(1)).expect("all files are good");
    // CPU account and /proc/stat both report one second of use and one second of idle time since
    // the previous sample.
    write_file("groups/cpu.stat", "usage_usec 1001000\n");
    let deadline = Instant::now() + WAIT_TIMEOUT;
    let check_deadline = || assert!(Instant::now() < deadline, "the account does not count");
    loop {
        check_deadline();
        write_file("stat", "cpu 200 0 0 200 0 0 0 0\ncpu0 1\ncpu1 1\nintr 0\n");
        sampler.sample(Micros(2)).expect("all files are good");
        write_file("stat", "");
        if sampler.sample(Micros(3)).is_ok() {
            break;
        }
    }
    // Three threads are runnable, but the CPU account shows no use.
    while sampler
        .sample(Micros(4))
        .expect("what is wrong is not read")
        .busy_share
        > 0.0
    {
        check_deadline();
    }
}

/// A limit that is set after the start counts from the next selection of the control group. The
/// CPU times before and after the change cannot be compared.
#[test]
fn limit_set_after_the_start_counts() {
    let dir = tempfile::tempdir().expect("a directory");
    let write_file = |name: &str, text: &str| {
        fs::write(dir.path().join(name), text).expect("the test's own file")
    };
    fs::create_dir_all(dir.path().join("self")).expect("the test's own directory");
    fs::create_dir_all(dir.path().join("groups/host")).expect("the test's own directory");
    write_file(
        "self/mountinfo",
        &format!(
            "9 8 0:1 / {} rw - cgroup2 cgroup2 rw\n",
            dir.path().join("groups").display()
        ),
    );
    write_file("self/cgroup", "0::/\n");
    write_file("groups/host/cpu.max", "50000 100000\n");
    write_file("groups/host/cpu.stat", "usage_usec 1000\n");
    write_file("stat", "cpu 100 0 0 100 0 0 0 0\ncpu0 1\ncpu1 1\nintr 0\n");
    write_file("loadavg", "1.00 1 1 3/100 7\n");
    write_file("meminfo", "MemTotal: 8 kB\nMemAvailable: 4 kB\n");
    let mut sampler = Sampler::open(dir.path()).expect("all files are there");
    let mut select_and_sample = |seconds| {
        sampler.select_limiting_group();
        let sample = sampler
            .sample(Micros::from_secs(seconds))
            .expect("all files are good");
        (
            sample.cpu_limit,
            sample.busy_share,
            sampler.take_cpu_times_restart(),
        )
    };
    assert_eq!(select_and_sample(1), (0.0, 1.0, false));
    // The process is moved to the limited group, and later the limit is removed.
    write_file("self/cgroup", "0::/host\n");
    assert_eq!(select_and_sample(2), (0.5, 0.0, true));
    write_file("groups/host/cpu.stat", "usage_usec 251000\n");
    assert_eq!(select_and_sample(3), (0.5, 0.5, false));
    write_file("groups/host/cpu.max", "max 100000\n");
    let (limit, _, is_restarted) = select_and_sample(4);
    assert_eq!((limit, is_restarted), (0.0, true));
    assert!(!select_and_sample(5).2, "a change is reported once");
}

/// A change of a file appears in the next sample that reads the file.
#[test]
fn samples_follow_their_files() {
    let dir = tempfile::tempdir().expect("a directory");
    let write_file = |name: &str, text: &str| {
        fs::write(dir.path().join(name), text).expect("the test's own file")
    };
    write_file(
        "stat",
        "cpu 100 0 0 100 0 0 0 0\ncpu0 1\ncpu1 1\ncpu2 1\ncpu3 1\nintr 0\n",
    );
    write_file("loadavg", "1.50 1 1 3/100 7\n");
    write_file("meminfo", "MemTotal: 8 kB\nMemAvailable: 4 kB\n");
    let mut sampler = Sampler::open(dir.path()).expect("all files are there");
    let first_sample = sampler.sample(Micros(5)).expect("all files are good");
    assert_eq!(
        (
            first_sample.at,
            first_sample.cores,
            first_sample.runnable_threads,
            first_sample.one_minute_load
        ),
        (Micros(5), 4, 2, 1.5)
    );
    assert_eq!(
        (
            first_sample.busy_share,
            first_sample.available_bytes,
            first_sample.cpu_pressure
        ),
        (0.5, 4096, 0.0)
    );
    write_file("stat", "cpu 130 0 0 110 0 0 0 0\ncpu0 1\nintr 0\n");
    let second_sample = sampler.sample(Micros(6)).expect("all files are good");
    assert_eq!((second_sample.busy_share, second_sample.cores), (0.75, 1));
    write_file("meminfo", "MemTotal: 8 kB\nMemAvailable: 2 kB\n");
    let third_sample = sampler
        .sample(Micros(5 + MEMORY_AGE_MAX.0 - 1))
        .expect("all files are good");
    assert_eq!(
        third_sample.available_bytes, 4096,
        "memory is not read so often"
    );
    assert_eq!(
        sampler
            .sample(Micros(5 + MEMORY_AGE_MAX.0))
            .expect("all files are good")
            .available_bytes,
        2048
    );
    write_file("meminfo", "MemTotal: 8 kB\nMemAvailable: 6 kB\n");
    assert_eq!(
        sampler
            .sample(Micros(0))
            .expect("all files are good")
            .available_bytes,
        6144,
        "the clock was set back"
    );
    write_file("elsewhere", "MemTotal: 8 kB\nMemAvailable: 1 kB\n");
    let mut sampler = sampler
        .with_meminfo_file(&dir.path().join("elsewhere"))
        .expect("it is there");
    assert_eq!(
        sampler
            .sample(Micros(MEMORY_AGE_MAX.0))
            .expect("all files are good")
            .available_bytes,
        1024
    );
    write_file("stat", "");
    assert!(sampler.sample(Micros(7)).is_err());
    assert!(
        Sampler::open(Path::new("/nowhere"))
            .expect_err("no files")
            .to_string()
            .contains("/nowhere/stat")
    );
}
