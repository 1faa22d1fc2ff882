//! Tests the watches of login records, terminals and settings with real files and the real kernel,
//! and samples of /proc with fixed and real files.

use pvm_load_watcher::file_watcher::{FileWatcher, WatchedPath, read_login_records};
use pvm_load_watcher::owner::LoginRecords;
use pvm_load_watcher::sampler::{MEMORY_INTERVAL, Sampler};
use pvm_load_watcher::utmp::{DEAD_PROCESS, RECORD_BYTES, USER_PROCESS, encode_record};
use sempa_proto::Micros;
use sempa_proto::load::Login;
use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Time limit of every wait; a loaded machine may need much of it.
const TIMEOUT: Duration = Duration::from_secs(20);

fn alice() -> Login {
    Login {
        user: "alice".into(),
        line: "pts/0".into(),
        from: "h9".into(),
        at: Micros::from_secs(1000),
    }
}

fn write(path: &Path, kind: i16) {
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)
        .expect("the test's own file");
    file.write_all_at(&encode_record(kind, &alice()), 0)
        .expect("the test's own file");
}

/// A watched file with login records.
struct WatchedLoginFile {
    path: PathBuf,
    watch: FileWatcher,
}

impl WatchedLoginFile {
    fn new(path: PathBuf) -> WatchedLoginFile {
        WatchedLoginFile {
            watch: FileWatcher::new(vec![WatchedPath::file(path.clone())]),
            path,
        }
    }

    fn read(&mut self) -> LoginRecords {
        self.watch.arm(0);
        read_login_records(&self.path)
    }

    /// Waits at most for `span`. Returns true if the login records may have changed.
    fn wait(&mut self, span: Duration) -> bool {
        self.watch.wait(span, None).path_changed(0)
    }

    fn is_unwatched(&self) -> bool {
        self.watch.is_unwatched(0)
    }
}

/// Waits until the login records equal `wanted`, and fails the test after a timeout.
fn wait_for_records(watch: &mut WatchedLoginFile, wanted: &LoginRecords) {
    let end = Instant::now() + TIMEOUT;
    loop {
        let now = watch.read();
        if now == *wanted {
            return;
        }
        let left = end.saturating_duration_since(Instant::now());
        assert!(watch.wait(left), "still {now:?}, not {wanted:?}");
    }
}

#[test]
fn login_and_logout_are_noticed_without_polling() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("utmp");
    write(&path, DEAD_PROCESS);
    let mut watch = WatchedLoginFile::new(path.clone());
    wait_for_records(&mut watch, &LoginRecords::Logins(Vec::new()));
    for _ in 0..3 {
        write(&path, USER_PROCESS);
        assert!(watch.wait(TIMEOUT));
        wait_for_records(&mut watch, &LoginRecords::Logins(vec![alice()]));
        write(&path, DEAD_PROCESS);
        assert!(watch.wait(TIMEOUT));
        wait_for_records(&mut watch, &LoginRecords::Logins(Vec::new()));
    }
    assert!(!watch.is_unwatched());
}

/// A file that is created later, replaced or removed is noticed.
#[test]
fn created_replaced_and_removed_files_are_noticed() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("utmp");
    let mut watch = WatchedLoginFile::new(path.clone());
    assert_eq!(watch.read(), LoginRecords::Missing);
    write(&path, USER_PROCESS);
    wait_for_records(&mut watch, &LoginRecords::Logins(vec![alice()]));
    let other = dir.path().join("other");
    write(&other, DEAD_PROCESS);
    fs::rename(&other, &path).expect("the test's own file");
    wait_for_records(&mut watch, &LoginRecords::Logins(Vec::new()));
    // The new file is watched instead of the replaced one.
    write(&path, USER_PROCESS);
    wait_for_records(&mut watch, &LoginRecords::Logins(vec![alice()]));
    fs::remove_file(&path).expect("the test's own file");
    wait_for_records(&mut watch, &LoginRecords::Missing);
    write(&path, USER_PROCESS);
    wait_for_records(&mut watch, &LoginRecords::Logins(vec![alice()]));
}

/// A directory that is created later is watched from the next retry on.
#[test]
fn late_directory_is_watched_from_the_next_look() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("run/utmp");
    let mut watch = WatchedLoginFile::new(path.clone());
    assert!(watch.is_unwatched());
    let looks = [0; 4].map(|_| watch.watch.retry_watch(0));
    assert_eq!(
        looks,
        [true, true, false, false],
        "without its folder it says nothing"
    );
    fs::create_dir(dir.path().join("run")).expect("the test's own directory");
    assert!(watch.watch.retry_watch(0));
    assert!(!watch.is_unwatched() && !watch.watch.retry_watch(0));
    write(&path, USER_PROCESS);
    wait_for_records(&mut watch, &LoginRecords::Logins(vec![alice()]));
    fs::remove_dir_all(dir.path().join("run")).expect("the test's own directory");
    wait_for_records(&mut watch, &LoginRecords::Missing);
    while !watch.is_unwatched() {
        assert!(watch.wait(TIMEOUT));
    }
    assert_eq!(watch.read(), LoginRecords::Missing);
    assert!(
        watch.is_unwatched() && watch.watch.retry_watch(0),
        "it is read once more"
    );
}

/// A change of a file that is not watched, in the directory of a watched one, does not end a wait.
#[test]
fn other_files_in_directory_cause_no_wake() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut watch = WatchedLoginFile::new(dir.path().join("utmp"));
    File::create(dir.path().join("other")).expect("the test's own file");
    assert!(!watch.wait(Duration::ZERO));
}

/// A change of one watched path is not reported for other paths in the same directory.
#[test]
fn change_is_reported_for_its_path_only() {
    let dir = tempfile::tempdir().expect("a directory");
    let at = |name: &str| dir.path().join(name);
    // Two of the paths are in the third, a directory that the kernel watches only once.
    let mut watch = FileWatcher::new(vec![
        WatchedPath::file(at("a")),
        WatchedPath::file(at("b")),
        WatchedPath::folder(at(""), "word-"),
    ]);
    let mut seen = |name: &str| {
        fs::write(at(name), "x").expect("the test's own file");
        let woken = watch.wait(TIMEOUT, None);
        (0..3).for_each(|i| watch.arm(i));
        // Discards the further events of this write.
        while watch.wait(Duration::ZERO, None).any_change() {}
        [
            woken.path_changed(0),
            woken.path_changed(1),
            woken.path_changed(2),
        ]
    };
    assert_eq!(seen("a"), [true, false, false]);
    assert_eq!(seen("b"), [false, true, false]);
    assert_eq!(seen("word-7"), [false, false, true]);
    assert_eq!(seen("b"), [false, true, false]);
}

/// Input at an idle terminal is noticed immediately; terminals that are not in the list are
/// ignored.
#[test]
fn key_at_an_idle_terminal_is_noticed_at_once() {
    let (idle, used) = (
        nix::pty::openpty(None, None).expect("a terminal"),
        nix::pty::openpty(None, None).expect("one"),
    );
    let name =
        |pty: &nix::pty::OpenptyResult| nix::unistd::ttyname(&pty.slave).expect("it has a name");
    let mut watch = FileWatcher::new(Vec::new());
    watch.watch_idle_terminals(&BTreeSet::from([name(&idle)]));
    let key = |pty: &nix::pty::OpenptyResult| {
        nix::unistd::write(&pty.master, b"x\n").expect("there is room");
        nix::unistd::read(&pty.slave, &mut [0; 8]).expect("a line");
    };
    key(&used);
    assert!(!watch.wait(Duration::ZERO, None).any_change());
    key(&idle);
    assert!(watch.wait(TIMEOUT, None).terminal_used());
    watch.watch_idle_terminals(&BTreeSet::new());
    while watch.wait(Duration::ZERO, None).any_change() {}
    key(&idle);
    assert!(!watch.wait(Duration::ZERO, None).any_change());
}

/// A change of a settings file is reported only after the writer has closed the file.
#[test]
fn settings_are_read_after_the_writer_closes() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("owner.toml");
    fs::write(&path, "cores = 2\n").expect("the test's own file");
    let mut watch = FileWatcher::new(vec![WatchedPath::settings(path.clone())]);
    let file = OpenOptions::new()
        .write(true)
        .truncate(true)
        .open(&path)
        .expect("the test's own file");
    file.write_all_at(b"cores = 3\n", 0)
        .expect("the test's own file");
    assert!(!watch.wait(Duration::ZERO, None).any_change());
    drop(file);
    assert!(watch.wait(TIMEOUT, None).path_changed(0));
}

/// A wait ends when the additional descriptor is readable.
#[test]
fn additional_descriptor_ends_wait() {
    let (read, write) = nix::unistd::pipe().expect("a pipe");
    let mut watch = FileWatcher::new(Vec::new());
    assert!(!watch.wait(Duration::ZERO, Some(read.as_fd())).other_ready);
    nix::unistd::write(&write, b"x").expect("there is room");
    assert!(watch.wait(TIMEOUT, Some(read.as_fd())).other_ready);
}

/// Login records that cannot be read yield the system's error text.
#[test]
fn unreadable_records_contain_reason() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut watch = WatchedLoginFile::new(dir.path().to_path_buf());
    assert!(matches!(watch.read(), LoginRecords::Unreadable(why) if why.contains("directory")));
}

/// An incomplete login record is ignored until the rest of the record is written.
#[test]
fn incomplete_record_is_ignored_until_complete() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("utmp");
    let whole = encode_record(USER_PROCESS, &alice());
    fs::write(&path, &whole[..RECORD_BYTES / 2]).expect("the test's own file");
    let mut watch = WatchedLoginFile::new(path.clone());
    assert_eq!(watch.read(), LoginRecords::Logins(Vec::new()));
    fs::write(&path, whole).expect("the test's own file");
    wait_for_records(&mut watch, &LoginRecords::Logins(vec![alice()]));
}

/// If an owner reserves memory, samples read memory and pressure alternately.
#[test]
fn kept_memory_is_read_with_the_pressure() {
    let dir = tempfile::tempdir().expect("a directory");
    let put = |name: &str, text: &str| {
        fs::write(dir.path().join(name), text).expect("the test's own file")
    };
    fs::create_dir(dir.path().join("pressure")).expect("the test's own directory");
    put("stat", "cpu 100 0 0 100 0 0 0 0\ncpu0 1\nintr 0\n");
    put("loadavg", "1.50 1 1 3/100 7\n");
    let says = |number: u64| {
        put(
            "meminfo",
            &format!("MemTotal: 99 kB\nMemAvailable: {number} kB\n"),
        );
        put(
            "pressure/cpu",
            &format!("some avg10={number}.00 avg60=0.00 avg300=0.00 total=0\n"),
        );
    };
    says(1);
    let mut sampler = Sampler::open(dir.path()).expect("all files are there");
    let mut sample = |number: u64, matters: bool| {
        says(number);
        sampler.set_memory_matters(matters);
        let sample = sampler.sample(Micros(number)).expect("all files are good");
        (
            sample.available_bytes >> 10,
            (sample.cpu_pressure * 100.0).round() as u64,
        )
    };
    assert_eq!(sample(2, false), (2, 2));
    assert_eq!(sample(3, false), (2, 3), "nobody keeps it");
    assert_eq!(
        [4, 5, 6, 7].map(|number| sample(number, true)),
        [(4, 3), (4, 5), (6, 5), (6, 7)]
    );
    assert_eq!([8, 9].map(|number| sample(number, false)), [(6, 8), (6, 9)]);
}

/// The load is computed from the CPU account of the outermost visible control group.
#[test]
fn load_comes_from_the_outermost_control_group() {
    let dir = tempfile::tempdir().expect("a directory");
    let put = |name: &str, text: &str| {
        fs::write(dir.path().join(name), text).expect("the test's own file")
    };
    for folder in ["self", "groups"] {
        fs::create_dir(dir.path().join(folder)).expect("the test's own directory");
    }
    put(
        "self/mountinfo",
        &format!(
            "9 8 0:1 / {} rw - cgroup2 cgroup2 rw\n",
            dir.path().join("groups").display()
        ),
    );
    put("groups/cgroup.procs", "");
    put("groups/cpu.stat", "usage_usec 1000\n");
    put("stat", "cpu 100 0 0 100 0 0 0 0\ncpu0 1\ncpu1 1\nintr 0\n");
    put("loadavg", "1.00 1 1 3/100 7\n");
    put("meminfo", "MemTotal: 8 kB\nMemAvailable: 4 kB\n");
    let mut sampler = Sampler::open(dir.path()).expect("all files are there");
    sampler.sample(Micros(1)).expect("all files are good");
    // Both sources report that one second was used and one second was idle since the previous
    // sample.
    put("groups/cpu.stat", "usage_usec 1001000\n");
    let deadline = Instant::now() + TIMEOUT;
    let told = || assert!(Instant::now() < deadline, "the account does not count");
    loop {
        told();
        put("stat", "cpu 200 0 0 200 0 0 0 0\ncpu0 1\ncpu1 1\nintr 0\n");
        sampler.sample(Micros(2)).expect("all files are good");
        put("stat", "");
        if sampler.sample(Micros(3)).is_ok() {
            break;
        }
    }
    // Three threads are runnable, but the CPU account shows no use.
    while sampler
        .sample(Micros(4))
        .expect("what is wrong is not read")
        .busy
        > 0.0
    {
        told();
    }
}

/// Samples of fixed files contain the numbers of the files, and follow their changes.
#[test]
fn samples_follow_their_files() {
    let dir = tempfile::tempdir().expect("a directory");
    let put = |name: &str, text: &str| {
        fs::write(dir.path().join(name), text).expect("the test's own file")
    };
    put(
        "stat",
        "cpu 100 0 0 100 0 0 0 0\ncpu0 1\ncpu1 1\ncpu2 1\ncpu3 1\nintr 0\n",
    );
    put("loadavg", "1.50 1 1 3/100 7\n");
    put("meminfo", "MemTotal: 8 kB\nMemAvailable: 4 kB\n");
    let mut sampler = Sampler::open(dir.path()).expect("all files are there");
    let first = sampler.sample(Micros(5)).expect("all files are good");
    assert_eq!(
        (first.at, first.cores, first.running, first.load1),
        (Micros(5), 4, 2, 1.5)
    );
    assert_eq!(
        (first.busy, first.available_bytes, first.cpu_pressure),
        (0.5, 4096, 0.0)
    );
    put("stat", "cpu 130 0 0 110 0 0 0 0\ncpu0 1\nintr 0\n");
    let second = sampler.sample(Micros(6)).expect("all files are good");
    assert_eq!((second.busy, second.cores), (0.75, 1));
    put("meminfo", "MemTotal: 8 kB\nMemAvailable: 2 kB\n");
    let soon = sampler
        .sample(Micros(5 + MEMORY_INTERVAL.0 - 1))
        .expect("all files are good");
    assert_eq!(soon.available_bytes, 4096, "memory is not read so often");
    assert_eq!(
        sampler
            .sample(Micros(5 + MEMORY_INTERVAL.0))
            .expect("all files are good")
            .available_bytes,
        2048
    );
    put("meminfo", "MemTotal: 8 kB\nMemAvailable: 6 kB\n");
    assert_eq!(
        sampler
            .sample(Micros(0))
            .expect("all files are good")
            .available_bytes,
        6144,
        "the clock was set back"
    );
    put("elsewhere", "MemTotal: 8 kB\nMemAvailable: 1 kB\n");
    let mut sampler = sampler
        .with_meminfo_file(&dir.path().join("elsewhere"))
        .expect("it is there");
    assert_eq!(
        sampler
            .sample(Micros(MEMORY_INTERVAL.0))
            .expect("all files are good")
            .available_bytes,
        1024
    );
    put("stat", "");
    assert!(sampler.sample(Micros(7)).is_err());
    assert!(
        Sampler::open(Path::new("/nowhere"))
            .expect_err("no files")
            .to_string()
            .contains("/nowhere/stat")
    );
}
