use super::*;
use proptest::prelude::*;
use std::os::unix::fs::symlink;

fn record(uid: u32, guests: u64, memory_bytes: u64) -> AccountRecord {
    let usage = HostUse {
        guests,
        services: 1,
        memory_bytes,
        largest_task_bytes: memory_bytes / 2,
        ..HostUse::default()
    };
    AccountRecord {
        uid,
        start_ticks: 5,
        usage,
    }
}

fn write_record(dir: &Path, pid: i32, record: &AccountRecord) {
    let path = record_path(dir, SessionId(pid));
    replace_file(&path, &record.to_string()).expect("the test's own directory");
}

/// The records of a user's taskers add up, and other users' do not count for the user.
#[test]
fn records_add_up() {
    let dir = tempfile::tempdir().expect("a directory");
    for (pid, uid, guests, memory) in [(7, 1000, 2, 100), (8, 1001, 5, 10), (9, 1000, 3, 60)] {
        write_record(dir.path(), pid, &record(uid, guests, memory));
    }
    let totals = read_totals(dir.path(), |_, _| true).expect("readable");
    let alice = totals.of_user(1000);
    assert_eq!((alice.guests, alice.services), (5, 2));
    assert_eq!((alice.memory_bytes, alice.largest_task_bytes), (160, 50));
    assert_eq!(totals.of_host().guests, 10);
    assert_eq!(totals.by_user()[&1001].guests, 5);
    assert_eq!(totals.by_user().len(), 2);
    let others = totals.without(SessionId(7)).of_user(1000);
    assert_eq!((others.guests, others.largest_task_bytes), (3, 30));
}

/// A tasker that has ended does not count, and its record is removed; malformed records and other
/// files do not disturb.
#[test]
fn only_running_taskers_count() {
    let dir = tempfile::tempdir().expect("a directory");
    let own_pid = std::process::id().cast_signed();
    let own_stat = procfs::process::Process::myself().and_then(|process| process.stat());
    let own_record = AccountRecord {
        start_ticks: own_stat.expect("it runs").starttime,
        ..record(1000, 2, 0)
    };
    write_record(dir.path(), own_pid, &own_record);
    // The first process exists, but has not started at this time.
    write_record(dir.path(), 1, &record(1000, 9, 0));
    write_record(dir.path(), i32::MAX, &record(1000, 9, 0));
    for (name, text) in [("3", "uid 1000"), ("x", "uid 1"), ("-4", ""), ("05", "")] {
        fs::write(dir.path().join(name), text).expect("the test's own directory");
    }
    symlink(own_pid.to_string(), dir.path().join("6")).expect("a link");
    let totals = read_totals(dir.path(), is_running).expect("readable");
    assert_eq!(totals.of_host(), own_record.usage);
    remove_ended(dir.path(), is_running);
    let names = fs::read_dir(dir.path()).expect("readable").flatten();
    let mut names: Vec<_> = names.map(|entry| entry.file_name()).collect();
    names.sort();
    let mut expected = ["-4", "05", "x"].map(OsString::from).to_vec();
    expected.push(own_pid.to_string().into());
    expected.sort();
    assert_eq!(names, expected);
    let missing = read_totals(&dir.path().join("none"), is_running).expect("no error");
    assert_eq!(missing, HostTotals::default());
}

#[test]
fn record_is_parsed_and_written() {
    let record = record(1000, 3, 77);
    assert_eq!(record.to_string().parse(), Ok(record));
    let later_version = format!("{record}sockets 5\n");
    assert_eq!(later_version.parse(), Ok(record));
    for text in [
        "",
        "uid 1",
        "start_ticks 1",
        "uid x\nstart_ticks 1",
        "uid 1\nstart_ticks",
        "uid -1\nstart_ticks 1",
        "uid 4294967296\nstart_ticks 1",
    ] {
        assert_eq!(text.parse::<AccountRecord>(), Err(InvalidRecord), "{text}");
    }
}

/// Only a number in a regular file that nobody else can write is a cap.
#[test]
fn cap_is_read_and_written() {
    let parent = tempfile::tempdir().expect("a directory");
    let dir = parent.path().join("account");
    assert_eq!(read_guest_cap(&dir), None);
    write_guest_cap(&dir, Some(4)).expect("the test's own directory");
    assert_eq!(read_guest_cap(&dir), Some(4));
    let path = parent.path().join(GUEST_CAP_NAME);
    let mode = |path: &Path| fs::metadata(path).expect("it exists").mode() & 0o777;
    assert_eq!(mode(&path), 0o644);
    fs::set_permissions(&path, Permissions::from_mode(0o666)).expect("the test's own file");
    assert_eq!(read_guest_cap(&dir), None);
    write_guest_cap(&dir, None).expect("the test's own directory");
    assert!(!path.exists());
    fs::write(parent.path().join("x"), "4").expect("the test's own directory");
    symlink("x", &path).expect("a link");
    assert_eq!(read_guest_cap(&dir), None);
}

#[test]
fn directory_is_configurable() {
    assert_eq!(account_dir(None), Path::new(ACCOUNT_DIR));
    assert_eq!(account_dir(Some("".into())), Path::new(ACCOUNT_DIR));
    assert_eq!(account_dir(Some("/x".into())), Path::new("/x"));
}

proptest! {
    /// No text makes the parser fail otherwise.
    #[test]
    fn any_text_is_parsed_or_refused(text in "(?s).{0,200}") {
        let _ = text.parse::<AccountRecord>();
    }
}
