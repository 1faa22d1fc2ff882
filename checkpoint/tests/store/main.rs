//! Tests the checkpoint store through its public interface.

mod copies;
mod removal;

use checkpoint::store::{CheckpointId, CheckpointInfo, CheckpointStore, StoreError, StoreLimits};
use proptest::prelude::*;
use sempa_proto::{Micros, Tid};
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

const JOB: Tid = Tid::from_raw(0x40001);
const TASK: Tid = Tid::from_raw(0x80001);
const OTHER_JOB: Tid = Tid::from_raw(0x40002);
/// Environment variable by which a child process of these tests receives its scratch directory. It
/// is unset in the tests themselves.
const CHILD_VARIABLE: &str = "STORE_TEST_CHILD";
/// Time limit for one step of a child process.
const STEP_TIMEOUT: Duration = Duration::from_secs(60);

type Files = BTreeMap<String, Vec<u8>>;

struct Scratch(tempfile::TempDir);

impl Scratch {
    fn new() -> Scratch {
        Scratch(tempfile::tempdir().expect("a directory"))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn store(&self, limits: StoreLimits) -> CheckpointStore {
        open_store(self.0.path(), limits)
    }

    /// Creates a directory with these files.
    fn write_images(&self, name: &str, files: &Files) -> PathBuf {
        let dir = self.path(name);
        write_files(&dir, files);
        dir
    }

    /// Writes a complete checkpoint of one task.
    fn write_checkpoint(
        &self,
        store: &CheckpointStore,
        job: Tid,
        second: u64,
        files: &Files,
    ) -> CheckpointInfo {
        let dir = self.write_images("images-of-a-set", files);
        let draft = store.begin(job, Micros::from_secs(second)).expect("begun");
        draft.add(job, &dir).expect("added");
        let info = draft.finish(b"meta").expect("finished");
        fs::remove_dir_all(dir).expect("removed");
        info
    }

    fn unpack(
        &self,
        store: &CheckpointStore,
        id: &CheckpointId,
        tid: Tid,
    ) -> Result<Files, StoreError> {
        let to = self.path("unpacked");
        let bytes = store.open_checkpoint(id)?.unpack(tid, &to);
        if bytes.is_err() {
            assert!(!to.exists(), "nothing is left");
        }
        let bytes = bytes?;
        let mode = |path: &Path| path.metadata().expect("there").mode() & 0o7777;
        assert_eq!(mode(&to), 0o700);
        let files = read_files(&to, |path| assert_eq!(mode(path), 0o600));
        assert_eq!(
            bytes,
            files
                .values()
                .map(|content| content.len() as u64)
                .sum::<u64>()
        );
        fs::remove_dir_all(to).expect("removed");
        Ok(files)
    }
}

fn open_store(scratch: &Path, limits: StoreLimits) -> CheckpointStore {
    CheckpointStore::open(&scratch.join("store"), &scratch.join("keys/key"), limits)
        .expect("opened")
}

fn write_files(dir: &Path, files: &Files) {
    fs::create_dir(dir).expect("made");
    for (name, content) in files {
        fs::write(dir.join(name), content).expect("written");
    }
}

fn read_files(dir: &Path, inspect: impl Fn(&Path)) -> Files {
    let entries = fs::read_dir(dir)
        .expect("readable")
        .map(|entry| entry.expect("readable"));
    entries
        .map(|entry| {
            inspect(&entry.path());
            (
                entry.file_name().into_string().expect("text"),
                fs::read(entry.path()).expect("readable"),
            )
        })
        .collect()
}

fn files_from(content: &[(&str, &[u8])]) -> Files {
    content
        .iter()
        .map(|(name, content)| (name.to_string(), content.to_vec()))
        .collect()
}

fn small_files() -> Files {
    files_from(&[("core.img", b"registers"), ("pages-1.img", b"memory")])
}

fn random_content(bytes: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    })
    .take(bytes)
    .collect()
}

/// Generates the content of a file: pieces of zeros or noise, with lengths near those of blocks and
/// chunks.
fn any_content() -> impl Strategy<Value = Vec<u8>> {
    let length = prop_oneof![
        0usize..20_000,
        Just(4095),
        Just(4096),
        Just(4097),
        Just(1 << 20),
        (1usize << 20) - 200..(1 << 20) + 200,
    ];
    let piece = (any::<bool>(), length).prop_map(|(zeros, bytes)| {
        if zeros {
            vec![0; bytes]
        } else {
            random_content(bytes)
        }
    });
    prop::collection::vec(piece, 0..4).prop_map(|pieces| pieces.concat())
}

fn any_files() -> impl Strategy<Value = Files> {
    prop::collection::btree_map("[a-zA-Z0-9._ -]{3,40}", any_content(), 0..5)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    #[test]
    fn unpacked_files_equal_added_files(parts in prop::collection::btree_map(1i32..9, any_files(), 0..4), meta: Vec<u8>) {
        let scratch = Scratch::new();
        let store = scratch.store(StoreLimits::default());
        let draft = store.begin(JOB, Micros(1_700_000_000_123_456)).expect("begun");
        for (tid, files) in &parts {
            let info = draft.add(Tid::from_raw(*tid), &scratch.write_images(&format!("images-{tid}"), files)).expect("added");
            prop_assert_eq!(info.images_bytes, files.values().map(|content| content.len() as u64).sum::<u64>());
        }
        let info = draft.finish(&meta).expect("finished");
        prop_assert_eq!((info.job, info.started), (JOB, Micros(1_700_000_000_123_456)));
        prop_assert_eq!(info.parts.len(), parts.len());
        let set = store.open_checkpoint(&info.id).expect("opened");
        prop_assert_eq!((set.info(), set.meta()), (&info, &meta[..]));
        let on_disk: u64 = fs::read_dir(scratch.path("store").join(info.id.to_string())).expect("readable")
            .map(|entry| entry.expect("readable").metadata().expect("there").len()).sum();
        prop_assert_eq!(info.bytes, on_disk);
        prop_assert_eq!(store.list_checkpoints().expect("listed").0, vec![info.clone()]);
        for (tid, files) in &parts {
            prop_assert_eq!(&scratch.unpack(&store, &info.id, Tid::from_raw(*tid)).expect("unpacked"), files);
        }
    }

    #[test]
    fn changed_byte_is_detected(files in any_files(), part: bool, at: prop::sample::Index, flip in 1u8..) {
        let scratch = Scratch::new();
        let store = scratch.store(StoreLimits::default());
        let info = scratch.write_checkpoint(&store, JOB, 1, &files);
        let path = scratch.path("store").join(info.id.to_string()).join(if part { "t40001" } else { "manifest" });
        let mut content = fs::read(&path).expect("there");
        let at = at.index(content.len());
        content[at] ^= flip;
        fs::write(&path, &content).expect("written");
        prop_assert!(scratch.unpack(&store, &info.id, JOB).is_err(), "byte {} of {}", at, path.display());
    }
}

/// True if the error says that a file was changed.
fn is_refused_as_changed(why: &StoreError) -> bool {
    matches!(
        why,
        StoreError::Changed { .. } | StoreError::OtherKey { .. }
    )
}

#[test]
fn every_byte_of_a_checkpoint_is_protected() {
    let scratch = Scratch::new();
    let store = scratch.store(StoreLimits::default());
    let info = scratch.write_checkpoint(&store, JOB, 1, &small_files());
    for name in ["manifest", "t40001"] {
        let path = scratch.path("store").join(info.id.to_string()).join(name);
        let whole = fs::read(&path).expect("there");
        for at in 0..whole.len() {
            let mut content = whole.clone();
            content[at] ^= 1;
            fs::write(&path, &content).expect("written");
            let why = scratch.unpack(&store, &info.id, JOB).expect_err("refused");
            assert!(is_refused_as_changed(&why), "byte {at} of {name}: {why}");
        }
        for content in [&whole[..whole.len() - 1], b"", &[&whole[..], b"x"].concat()] {
            fs::write(&path, content).expect("written");
            assert!(
                is_refused_as_changed(&scratch.unpack(&store, &info.id, JOB).expect_err("refused")),
                "{name}"
            );
        }
        fs::remove_file(&path).expect("removed");
        assert!(
            is_refused_as_changed(&scratch.unpack(&store, &info.id, JOB).expect_err("refused")),
            "{name}"
        );
        symlink("/dev/zero", &path).expect("made");
        assert!(
            is_refused_as_changed(&scratch.unpack(&store, &info.id, JOB).expect_err("refused")),
            "{name}"
        );
        fs::remove_file(&path).expect("removed");
        fs::write(&path, &whole).expect("written");
        assert_eq!(
            scratch.unpack(&store, &info.id, JOB).expect("as it was"),
            small_files()
        );
    }
}

/// Reading is refused if a file was replaced by a file of another checkpoint, or if a checkpoint
/// was renamed.
#[test]
fn swapped_files_and_renamed_checkpoints_are_refused() {
    let scratch = Scratch::new();
    let store = scratch.store(StoreLimits::default());
    let images = scratch.write_images("images", &small_files());
    let make = |second| {
        let draft = store.begin(JOB, Micros::from_secs(second)).expect("begun");
        draft.add(JOB, &images).expect("added");
        draft.add(TASK, &images).expect("added");
        draft.finish(b"meta").expect("finished").id
    };
    let (one, other) = (make(1), make(2));
    let file = |id: CheckpointId, name: &str| scratch.path("store").join(id.to_string()).join(name);
    for (from, to) in [
        (file(one, "t40001"), file(other, "t40001")),
        (file(other, "t80001"), file(other, "t40001")),
        (file(one, "manifest"), file(other, "manifest")),
        (file(other, "t40001"), file(other, "manifest")),
    ] {
        let whole = fs::read(&to).expect("there");
        fs::copy(&from, &to).expect("copied");
        assert!(
            is_refused_as_changed(&scratch.unpack(&store, &other, JOB).expect_err("refused")),
            "{}",
            from.display()
        );
        fs::write(&to, whole).expect("written");
        assert_eq!(
            scratch.unpack(&store, &other, JOB).expect("as it was"),
            small_files()
        );
    }
    // Simulate an attack: an older checkpoint under a newer name.
    let newest: CheckpointId = "t40001-20991231T235959-1".parse().expect("a name");
    fs::rename(
        scratch.path("store").join(one.to_string()),
        scratch.path("store").join(newest.to_string()),
    )
    .expect("renamed");
    assert!(is_refused_as_changed(
        &store.open_checkpoint(&newest).expect_err("refused")
    ));
    let (sets, unreadable) = store.list_checkpoints().expect("listed");
    assert_eq!((sets.len(), unreadable.len()), (1, 1));
    assert_eq!(unreadable[0].0, newest.to_string());
    // The checkpoint is not swept, but can be removed.
    assert!(
        store
            .enforce_limits(|_| false)
            .expect("swept")
            .removed
            .is_empty()
    );
    store.remove(&newest).expect("removed");
    assert!(store.list_checkpoints().expect("listed").1.is_empty());
}

/// A copied store cannot be read without its key, and can be read with it.
#[test]
fn store_is_readable_only_with_its_key() {
    let scratch = Scratch::new();
    let store = scratch.store(StoreLimits::default());
    let secret = random_content(50_000);
    let info = scratch.write_checkpoint(&store, JOB, 1, &files_from(&[("pages-1.img", &secret)]));
    let copy = Scratch::new();
    let (from, to) = (
        scratch.path("store").join(info.id.to_string()),
        copy.path("store").join(info.id.to_string()),
    );
    let without = copy.store(StoreLimits::default());
    write_files(&to, &read_files(&from, |_| ()));
    fs::remove_file(to.join("lock")).expect("it need not come along");
    for content in read_files(&from, |_| ()).values() {
        assert!(
            !content.windows(64).any(|window| window == &secret[..64]),
            "nothing can be read"
        );
    }
    let (sets, unreadable) = without.list_checkpoints().expect("listed");
    assert!(
        sets.is_empty() && matches!(unreadable[0].1, StoreError::OtherKey { .. }),
        "{unreadable:?}"
    );
    assert!(
        unreadable[0]
            .1
            .to_string()
            .contains(&copy.path("keys/key").display().to_string())
    );
    fs::copy(scratch.path("keys/key"), copy.path("keys/key")).expect("copied");
    let with = copy.store(StoreLimits::default());
    assert_eq!(
        with.list_checkpoints().expect("listed").0,
        std::slice::from_ref(&info)
    );
    assert_eq!(
        copy.unpack(&with, &info.id, JOB).expect("unpacked")["pages-1.img"],
        secret
    );
}

/// The directory and the key file are created for the user alone. They are refused if other users
/// have access.
#[test]
fn directory_and_key_must_be_private() {
    let scratch = Scratch::new();
    let (dir, key) = (scratch.path("a/store"), scratch.path("b/key"));
    let open = || CheckpointStore::open(&dir, &key, StoreLimits::default());
    open().expect("made");
    let mode = |path: &Path| path.metadata().expect("there").mode() & 0o7777;
    assert_eq!(
        (mode(&dir), mode(&key), fs::read(&key).expect("there").len()),
        (0o700, 0o600, 32)
    );
    let first = fs::read(&key).expect("there");
    open().expect("opened again");
    assert_eq!(fs::read(&key).expect("there"), first);
    assert_eq!(
        fs::read_dir(scratch.path("b")).expect("readable").count(),
        1,
        "nothing beside the key"
    );
    let chmod = |path: &Path, mode| {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("changed")
    };
    for bad in [0o750, 0o705, 0o701, 0o777] {
        chmod(&dir, bad);
        assert!(
            matches!(open(), Err(StoreError::UnusableDirectory { .. })),
            "{bad:o}"
        );
    }
    chmod(&dir, 0o700);
    for bad in [0o640, 0o604, 0o620] {
        chmod(&key, bad);
        assert!(
            matches!(open(), Err(StoreError::UnusableKey { .. })),
            "{bad:o}"
        );
    }
    chmod(&key, 0o600);
    fs::write(&key, &first[..31]).expect("written");
    assert!(matches!(open(), Err(StoreError::UnusableKey { .. })));
    fs::write(&key, &first).expect("written");
    let inside = CheckpointStore::open(&dir, &dir.join("key"), StoreLimits::default());
    assert!(matches!(inside, Err(StoreError::UnusableKey { .. })) && !dir.join("key").exists());
    fs::write(scratch.path("file"), "").expect("written");
    assert!(matches!(
        CheckpointStore::open(&scratch.path("file"), &key, StoreLimits::default()),
        Err(StoreError::UnusableDirectory { .. })
    ));
    // Only root can change the owner of the key file. A key file of another user is refused.
    if std::os::unix::fs::chown(&key, Some(12345), None).is_ok() {
        assert!(
            matches!(open(), Err(StoreError::UnusableKey { why, .. }) if why.contains("belongs to user 12345"))
        );
        std::os::unix::fs::chown(&key, Some(0), None).expect("back");
        std::os::unix::fs::chown(&dir, Some(12345), None).expect("away");
        assert!(
            matches!(open(), Err(StoreError::UnusableDirectory { why, .. }) if why.contains("belongs to user 12345"))
        );
    }
}

/// Only regular files are accepted as images, and a refused task leaves the draft unchanged.
#[test]
fn other_than_regular_files_are_refused() {
    let scratch = Scratch::new();
    let store = scratch.store(StoreLimits::default());
    let good = scratch.write_images("good", &small_files());
    let draft = store.begin(JOB, Micros(0)).expect("begun");
    draft.add(JOB, &good).expect("added");
    let bad = scratch.write_images("bad", &small_files());
    let odd = bad.join("odd");
    let refused = || {
        matches!(
            draft.add(TASK, &bad),
            Err(StoreError::UnusableImages { .. })
        )
    };
    symlink("core.img", &odd).expect("made");
    assert!(refused());
    fs::remove_file(&odd).expect("removed");
    fs::create_dir(&odd).expect("made");
    assert!(refused());
    fs::remove_dir(&odd).expect("removed");
    nix::unistd::mkfifo(&odd, nix::sys::stat::Mode::S_IRUSR).expect("made");
    assert!(refused());
    fs::remove_file(&odd).expect("removed");
    symlink(&bad, scratch.path("link")).expect("made");
    assert!(matches!(
        draft.add(TASK, &scratch.path("link")),
        Err(StoreError::UnusableImages { .. })
    ));
    assert!(matches!(
        draft.add(TASK, &scratch.path("nowhere")),
        Err(StoreError::UnusableImages { .. })
    ));
    assert!(matches!(
        draft.add(JOB, &good),
        Err(StoreError::TaskExists(JOB))
    ));
    draft.add(TASK, &bad).expect("it can be tried again");
    let info = draft.finish(b"").expect("finished");
    assert_eq!(
        info.parts.iter().map(|part| part.tid).collect::<Vec<_>>(),
        [JOB, TASK]
    );
    assert_eq!(
        scratch.unpack(&store, &info.id, TASK).expect("unpacked"),
        small_files()
    );
}

#[test]
fn existing_directory_is_not_overwritten() {
    let scratch = Scratch::new();
    let store = scratch.store(StoreLimits::default());
    let info = scratch.write_checkpoint(&store, JOB, 1, &small_files());
    let set = store.open_checkpoint(&info.id).expect("opened");
    let there = scratch.write_images("there", &files_from(&[("core.img", b"mine")]));
    assert!(matches!(
        set.unpack(JOB, &there),
        Err(StoreError::Io { .. })
    ));
    assert_eq!(
        read_files(&there, |_| ()),
        files_from(&[("core.img", b"mine")])
    );
    assert!(matches!(
        set.unpack(TASK, &scratch.path("new")),
        Err(StoreError::NoTask { .. })
    ));
    assert!(!scratch.path("new").exists());
}

/// Zeros occupy no space in the store or in unpacked files.
#[test]
fn zeros_use_no_space() {
    let scratch = Scratch::new();
    let store = scratch.store(StoreLimits::default());
    let mut memory = vec![0; 48 << 20];
    memory[20 << 20..][..5].copy_from_slice(b"state");
    let info = scratch.write_checkpoint(&store, JOB, 1, &files_from(&[("pages-1.img", &memory)]));
    assert_eq!(info.parts[0].images_bytes, 48 << 20);
    assert!(info.bytes < 64 << 10, "{}", info.bytes);
    let to = scratch.path("sparse");
    store
        .open_checkpoint(&info.id)
        .expect("opened")
        .unpack(JOB, &to)
        .expect("unpacked");
    assert_eq!(fs::read(to.join("pages-1.img")).expect("there"), memory);
}

#[test]
fn threads_add_tasks_concurrently() {
    let scratch = Scratch::new();
    let store = scratch.store(StoreLimits::default());
    let tasks: Vec<Tid> = (1..=8)
        .map(|local| Tid::from_raw(0x40000 + local))
        .collect();
    let content = |tid: Tid| {
        files_from(&[(
            "pages-1.img",
            &random_content(300_000 + tid.raw() as usize % 100)[..],
        )])
    };
    let draft = store.begin(JOB, Micros(0)).expect("begun");
    std::thread::scope(|scope| {
        for tid in &tasks {
            let (draft, images) = (
                &draft,
                scratch.write_images(&tid.to_string(), &content(*tid)),
            );
            scope.spawn(move || draft.add(*tid, &images).expect("added"));
        }
    });
    let info = draft.finish(b"").expect("finished");
    assert_eq!(
        info.parts.iter().map(|part| part.tid).collect::<Vec<_>>(),
        tasks
    );
    for tid in tasks {
        assert_eq!(
            scratch.unpack(&store, &info.id, tid).expect("unpacked"),
            content(tid)
        );
    }
}

/// The program of the child process, not a test: it writes checkpoints and prints each step until
/// it is killed.
#[test]
#[ignore = "child process of another test"]
fn child_that_writes_checkpoints() {
    let Some(scratch) = std::env::var_os(CHILD_VARIABLE).map(PathBuf::from) else {
        return;
    };
    let store = open_store(
        &scratch,
        StoreLimits {
            checkpoints_max: 2,
            ..StoreLimits::default()
        },
    );
    let images = scratch.join("images");
    for second in 0.. {
        let draft = store.begin(JOB, Micros::from_secs(second)).expect("begun");
        println!("step begun");
        draft.add(JOB, &images).expect("added");
        println!("step added");
        draft.add(TASK, &images).expect("added");
        println!("step added");
        draft.finish(b"meta").expect("finished");
        println!("step finished");
        store.enforce_limits(|_| false).expect("swept");
        println!("step swept");
    }
}

/// Starts a child process. Returns the process and a channel that receives its steps.
fn start_child(scratch: &Scratch) -> (Child, Receiver<String>) {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command
        .args([
            "--exact",
            "child_that_writes_checkpoints",
            "--ignored",
            "--nocapture",
        ])
        .env(CHILD_VARIABLE, scratch.0.path());
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("started");
    let output = BufReader::new(child.stdout.take().expect("piped"));
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        let steps = output
            .lines()
            .map_while(Result::ok)
            .filter(|line| line.contains("step "));
        steps.map_while(|step| sender.send(step).ok()).count()
    });
    (child, receiver)
}

/// Kills a child process after it has completed `steps` steps.
fn kill_after(steps: usize, (mut child, receiver): (Child, Receiver<String>)) {
    let all = (0..steps).try_for_each(|_| receiver.recv_timeout(STEP_TIMEOUT).map(drop));
    child.kill().expect("killed");
    child.wait().expect("reaped");
    all.expect("it went on");
}

/// After processes that use the same store concurrently are killed, only complete checkpoints are
/// visible.
#[test]
fn killed_writers_leave_complete_checkpoints() {
    let scratch = Scratch::new();
    let content = files_from(&[
        ("pages-1.img", &random_content(2 << 20)),
        ("core.img", b"registers"),
    ]);
    scratch.write_images("images", &content);
    // Kill the processes at every point from the first step to the middle of the third round.
    for steps in 1..=12 {
        let (one, other) = (start_child(&scratch), start_child(&scratch));
        kill_after(steps, one);
        kill_after(steps, other);
        let store = scratch.store(StoreLimits {
            checkpoints_max: 2,
            ..StoreLimits::default()
        });
        let names = read_names(&scratch.path("store"));
        assert!(names.iter().all(|name| !name.starts_with('.')), "{names:?}");
        let (sets, unreadable) = store.list_checkpoints().expect("listed");
        assert!(unreadable.is_empty(), "{unreadable:?}");
        for set in sets {
            for tid in [JOB, TASK] {
                assert_eq!(
                    scratch.unpack(&store, &set.id, tid).expect("unpacked"),
                    content
                );
            }
        }
        assert!(
            store
                .enforce_limits(|_| false)
                .expect("swept")
                .checkpoints_over_limit
                == 0
        );
    }
    assert!(!read_names(&scratch.path("store")).is_empty());
}

fn read_names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir)
        .expect("readable")
        .map(|entry| entry.expect("readable"));
    entries
        .map(|entry| entry.file_name().into_string().expect("text"))
        .collect()
}
