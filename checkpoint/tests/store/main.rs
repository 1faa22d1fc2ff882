//! Tests the checkpoint store through its public interface.

mod claims;
mod copies;
mod damage;
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
/// Environment variable by which a child process of these tests receives its scratch directory. The
/// variable is unset in the tests themselves.
const CHILD_DIR_VARIABLE: &str = "STORE_TEST_CHILD";
/// Time limit for one step of a child process.
const STEP_TIMEOUT: Duration = Duration::from_secs(60);

type Files = BTreeMap<String, Vec<u8>>;

struct ScratchDir(tempfile::TempDir);

impl ScratchDir {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a directory"))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn open_own_store(&self, limits: StoreLimits) -> CheckpointStore {
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
        start_second: u64,
        files: &Files,
    ) -> CheckpointInfo {
        let dir = self.write_images("images-of-a-set", files);
        let draft = store
            .begin(job, Micros::from_secs(start_second))
            .expect("begun");
        draft.add_task(job, &dir).expect("added");
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
        let unpack_dir = self.path("unpacked");
        let bytes = store.open_checkpoint(id)?.unpack_task(tid, &unpack_dir);
        if bytes.is_err() {
            assert!(!unpack_dir.exists(), "nothing is left");
        }
        let bytes = bytes?;
        let mode = |path: &Path| path.metadata().expect("there").mode() & 0o7777;
        assert_eq!(mode(&unpack_dir), 0o700);
        let files = read_files(&unpack_dir, |path| assert_eq!(mode(path), 0o600));
        assert_eq!(
            bytes,
            files
                .values()
                .map(|content| content.len() as u64)
                .sum::<u64>()
        );
        fs::remove_dir_all(unpack_dir).expect("removed");
        Ok(files)
    }
}

fn open_store(scratch_dir: &Path, limits: StoreLimits) -> CheckpointStore {
    CheckpointStore::open(
        &scratch_dir.join("store"),
        &scratch_dir.join("keys/key"),
        limits,
    )
    .expect("opened")
}

fn write_files(dir: &Path, files: &Files) {
    fs::create_dir(dir).expect("made");
    for (name, content) in files {
        fs::write(dir.join(name), content).expect("written");
    }
}

fn read_files(dir: &Path, check_path: impl Fn(&Path)) -> Files {
    let entries = fs::read_dir(dir)
        .expect("readable")
        .map(|entry| entry.expect("readable"));
    entries
        .map(|entry| {
            check_path(&entry.path());
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
    let piece = (any::<bool>(), length).prop_map(|(is_zero, bytes)| {
        if is_zero {
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
    fn unpacked_files_equal_added_files(parts in prop::collection::btree_map(1i32..9, any_files(), 0..4), description: Vec<u8>) {
        let scratch_dir = ScratchDir::new();
        let store = scratch_dir.open_own_store(StoreLimits::default());
        let draft = store.begin(JOB, Micros(1_700_000_000_123_456)).expect("begun");
        for (tid, files) in &parts {
            let info = draft.add_task(Tid::from_raw(*tid), &scratch_dir.write_images(&format!("images-{tid}"), files)).expect("added");
            prop_assert_eq!(info.images_bytes, files.values().map(|content| content.len() as u64).sum::<u64>());
        }
        let info = draft.finish(&description).expect("finished");
        prop_assert_eq!((info.job, info.started_at), (JOB, Micros(1_700_000_000_123_456)));
        prop_assert_eq!(info.parts.len(), parts.len());
        let checkpoint = store.open_checkpoint(&info.id).expect("opened");
        prop_assert_eq!((checkpoint.info(), checkpoint.description()), (&info, &description[..]));
        let disk_bytes: u64 = fs::read_dir(scratch_dir.path("store").join(info.id.to_string())).expect("readable")
            .map(|entry| entry.expect("readable").metadata().expect("there").len()).sum();
        prop_assert_eq!(info.bytes, disk_bytes);
        prop_assert_eq!(store.list_checkpoints().expect("listed").0, vec![info.clone()]);
        for (tid, files) in &parts {
            prop_assert_eq!(&scratch_dir.unpack(&store, &info.id, Tid::from_raw(*tid)).expect("unpacked"), files);
        }
    }

    #[test]
    fn changed_byte_is_detected(files in any_files(), in_part: bool, index: prop::sample::Index, flipped_bits in 1u8..) {
        let scratch_dir = ScratchDir::new();
        let store = scratch_dir.open_own_store(StoreLimits::default());
        let info = scratch_dir.write_checkpoint(&store, JOB, 1, &files);
        let path = scratch_dir.path("store").join(info.id.to_string()).join(if in_part { "t40001" } else { "manifest" });
        let mut content = fs::read(&path).expect("there");
        let index = index.index(content.len());
        content[index] ^= flipped_bits;
        fs::write(&path, &content).expect("written");
        prop_assert!(scratch_dir.unpack(&store, &info.id, JOB).is_err(), "byte {} of {}", index, path.display());
    }
}

/// True if the error says that a file was changed.
fn is_changed_error(error: &StoreError) -> bool {
    matches!(
        error,
        StoreError::Changed { .. } | StoreError::OtherKey { .. }
    )
}

#[test]
fn every_byte_of_a_checkpoint_is_protected() {
    let scratch_dir = ScratchDir::new();
    let store = scratch_dir.open_own_store(StoreLimits::default());
    let info = scratch_dir.write_checkpoint(&store, JOB, 1, &small_files());
    for name in ["manifest", "t40001"] {
        let path = scratch_dir
            .path("store")
            .join(info.id.to_string())
            .join(name);
        let original_content = fs::read(&path).expect("there");
        for index in 0..original_content.len() {
            let mut content = original_content.clone();
            content[index] ^= 1;
            fs::write(&path, &content).expect("written");
            let error = scratch_dir
                .unpack(&store, &info.id, JOB)
                .expect_err("refused");
            assert!(is_changed_error(&error), "byte {index} of {name}: {error}");
        }
        for content in [
            &original_content[..original_content.len() - 1],
            b"",
            &[&original_content[..], b"x"].concat(),
        ] {
            fs::write(&path, content).expect("written");
            assert!(
                is_changed_error(
                    &scratch_dir
                        .unpack(&store, &info.id, JOB)
                        .expect_err("refused")
                ),
                "{name}"
            );
        }
        fs::remove_file(&path).expect("removed");
        assert!(
            is_changed_error(
                &scratch_dir
                    .unpack(&store, &info.id, JOB)
                    .expect_err("refused")
            ),
            "{name}"
        );
        symlink("/dev/zero", &path).expect("made");
        assert!(
            is_changed_error(
                &scratch_dir
                    .unpack(&store, &info.id, JOB)
                    .expect_err("refused")
            ),
            "{name}"
        );
        fs::remove_file(&path).expect("removed");
        fs::write(&path, &original_content).expect("written");
        assert_eq!(
            scratch_dir
                .unpack(&store, &info.id, JOB)
                .expect("as it was"),
            small_files()
        );
    }
}

/// Reading is refused if a file was replaced by a file of another checkpoint, or if a checkpoint
/// was renamed.
#[test]
fn swapped_files_and_renamed_checkpoints_are_refused() {
    let scratch_dir = ScratchDir::new();
    let store = scratch_dir.open_own_store(StoreLimits::default());
    let image_dir = scratch_dir.write_images("images", &small_files());
    let write_checkpoint = |start_second| {
        let draft = store
            .begin(JOB, Micros::from_secs(start_second))
            .expect("begun");
        draft.add_task(JOB, &image_dir).expect("added");
        draft.add_task(TASK, &image_dir).expect("added");
        draft.finish(b"meta").expect("finished").id
    };
    let (first_id, second_id) = (write_checkpoint(1), write_checkpoint(2));
    let file =
        |id: CheckpointId, name: &str| scratch_dir.path("store").join(id.to_string()).join(name);
    for (source_path, target_path) in [
        (file(first_id, "t40001"), file(second_id, "t40001")),
        (file(second_id, "t80001"), file(second_id, "t40001")),
        (file(first_id, "manifest"), file(second_id, "manifest")),
        (file(second_id, "t40001"), file(second_id, "manifest")),
    ] {
        let original_content = fs::read(&target_path).expect("there");
        fs::copy(&source_path, &target_path).expect("copied");
        assert!(
            is_changed_error(
                &scratch_dir
                    .unpack(&store, &second_id, JOB)
                    .expect_err("refused")
            ),
            "{}",
            source_path.display()
        );
        fs::write(&target_path, original_content).expect("written");
        assert_eq!(
            scratch_dir
                .unpack(&store, &second_id, JOB)
                .expect("as it was"),
            small_files()
        );
    }
    // Simulate an attack: an older checkpoint under a newer name.
    let newest_id: CheckpointId = "t40001-20991231T235959-1".parse().expect("a name");
    fs::rename(
        scratch_dir.path("store").join(first_id.to_string()),
        scratch_dir.path("store").join(newest_id.to_string()),
    )
    .expect("renamed");
    assert!(is_changed_error(
        &store.open_checkpoint(&newest_id).expect_err("refused")
    ));
    let (checkpoints, unreadable_entries) = store.list_checkpoints().expect("listed");
    assert_eq!((checkpoints.len(), unreadable_entries.len()), (1, 1));
    assert_eq!(unreadable_entries[0].0, newest_id.to_string());
    // The checkpoint is not swept, but can be removed.
    assert!(
        store
            .enforce_limits(|_| false)
            .expect("swept")
            .removed
            .is_empty()
    );
    store.remove_checkpoint(&newest_id).expect("removed");
    assert!(store.list_checkpoints().expect("listed").1.is_empty());
}

/// A copied store cannot be read with a new key, and can be read with the original key.
#[test]
fn store_is_readable_only_with_its_key() {
    let scratch_dir = ScratchDir::new();
    let store = scratch_dir.open_own_store(StoreLimits::default());
    let secret_content = random_content(50_000);
    let info = scratch_dir.write_checkpoint(
        &store,
        JOB,
        1,
        &files_from(&[("pages-1.img", &secret_content)]),
    );
    let copy_scratch_dir = ScratchDir::new();
    let (source_dir, target_dir) = (
        scratch_dir.path("store").join(info.id.to_string()),
        copy_scratch_dir.path("store").join(info.id.to_string()),
    );
    let store_with_new_key = copy_scratch_dir.open_own_store(StoreLimits::default());
    write_files(&target_dir, &read_files(&source_dir, |_| ()));
    fs::remove_file(target_dir.join("lock")).expect("it need not come along");
    for content in read_files(&source_dir, |_| ()).values() {
        assert!(
            !content
                .windows(64)
                .any(|window| window == &secret_content[..64]),
            "nothing can be read"
        );
    }
    let (checkpoints, unreadable_entries) = store_with_new_key.list_checkpoints().expect("listed");
    assert!(
        checkpoints.is_empty() && matches!(unreadable_entries[0].1, StoreError::OtherKey { .. }),
        "{unreadable_entries:?}"
    );
    assert!(
        unreadable_entries[0]
            .1
            .to_string()
            .contains(&copy_scratch_dir.path("keys/key").display().to_string())
    );
    fs::copy(
        scratch_dir.path("keys/key"),
        copy_scratch_dir.path("keys/key"),
    )
    .expect("copied");
    let store_with_key = copy_scratch_dir.open_own_store(StoreLimits::default());
    assert_eq!(
        store_with_key.list_checkpoints().expect("listed").0,
        std::slice::from_ref(&info)
    );
    assert_eq!(
        copy_scratch_dir
            .unpack(&store_with_key, &info.id, JOB)
            .expect("unpacked")["pages-1.img"],
        secret_content
    );
}

/// The directory and the key file are created with access for the user only. They are refused if
/// other users have access.
#[test]
fn directory_and_key_must_be_private() {
    let scratch_dir = ScratchDir::new();
    let (dir, key_path) = (scratch_dir.path("a/store"), scratch_dir.path("b/key"));
    let try_open = || CheckpointStore::open(&dir, &key_path, StoreLimits::default());
    try_open().expect("made");
    let mode = |path: &Path| path.metadata().expect("there").mode() & 0o7777;
    assert_eq!(
        (
            mode(&dir),
            mode(&key_path),
            fs::read(&key_path).expect("there").len()
        ),
        (0o700, 0o600, 32)
    );
    let first_key = fs::read(&key_path).expect("there");
    try_open().expect("opened again");
    assert_eq!(fs::read(&key_path).expect("there"), first_key);
    assert_eq!(
        fs::read_dir(scratch_dir.path("b"))
            .expect("readable")
            .count(),
        1,
        "nothing beside the key"
    );
    let chmod = |path: &Path, mode| {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("changed")
    };
    for refused_mode in [0o750, 0o705, 0o701, 0o777] {
        chmod(&dir, refused_mode);
        assert!(
            matches!(try_open(), Err(StoreError::UnusableDirectory { .. })),
            "{refused_mode:o}"
        );
    }
    chmod(&dir, 0o700);
    for refused_mode in [0o640, 0o604, 0o620] {
        chmod(&key_path, refused_mode);
        assert!(
            matches!(try_open(), Err(StoreError::UnusableKey { .. })),
            "{refused_mode:o}"
        );
    }
    chmod(&key_path, 0o600);
    fs::write(&key_path, &first_key[..31]).expect("written");
    assert!(matches!(try_open(), Err(StoreError::UnusableKey { .. })));
    fs::write(&key_path, &first_key).expect("written");
    let key_inside_result = CheckpointStore::open(&dir, &dir.join("key"), StoreLimits::default());
    assert!(
        matches!(key_inside_result, Err(StoreError::UnusableKey { .. }))
            && !dir.join("key").exists()
    );
    fs::write(scratch_dir.path("file"), "").expect("written");
    assert!(matches!(
        CheckpointStore::open(&scratch_dir.path("file"), &key_path, StoreLimits::default()),
        Err(StoreError::UnusableDirectory { .. })
    ));
    // Only root can change the owner of the key file. A key file of another user is refused.
    if std::os::unix::fs::chown(&key_path, Some(12345), None).is_ok() {
        assert!(
            matches!(try_open(), Err(StoreError::UnusableKey { why, .. }) if why.contains("belongs to user 12345"))
        );
        std::os::unix::fs::chown(&key_path, Some(0), None).expect("back");
        std::os::unix::fs::chown(&dir, Some(12345), None).expect("away");
        assert!(
            matches!(try_open(), Err(StoreError::UnusableDirectory { why, .. }) if why.contains("belongs to user 12345"))
        );
    }
}

/// Only regular files are accepted as images, and a refused task leaves the draft unchanged.
#[test]
fn other_than_regular_files_are_refused() {
    let scratch_dir = ScratchDir::new();
    let store = scratch_dir.open_own_store(StoreLimits::default());
    let image_dir = scratch_dir.write_images("good", &small_files());
    let draft = store.begin(JOB, Micros(0)).expect("begun");
    draft.add_task(JOB, &image_dir).expect("added");
    let refused_dir = scratch_dir.write_images("bad", &small_files());
    let odd_path = refused_dir.join("odd");
    let expect_refusal = || {
        matches!(
            draft.add_task(TASK, &refused_dir),
            Err(StoreError::UnusableImages { .. })
        )
    };
    symlink("core.img", &odd_path).expect("made");
    assert!(expect_refusal());
    fs::remove_file(&odd_path).expect("removed");
    fs::create_dir(&odd_path).expect("made");
    assert!(expect_refusal());
    fs::remove_dir(&odd_path).expect("removed");
    nix::unistd::mkfifo(&odd_path, nix::sys::stat::Mode::S_IRUSR).expect("made");
    assert!(expect_refusal());
    fs::remove_file(&odd_path).expect("removed");
    symlink(&refused_dir, scratch_dir.path("link")).expect("made");
    assert!(matches!(
        draft.add_task(TASK, &scratch_dir.path("link")),
        Err(StoreError::UnusableImages { .. })
    ));
    assert!(matches!(
        draft.add_task(TASK, &scratch_dir.path("nowhere")),
        Err(StoreError::UnusableImages { .. })
    ));
    assert!(matches!(
        draft.add_task(JOB, &image_dir),
        Err(StoreError::TaskExists(JOB))
    ));
    draft
        .add_task(TASK, &refused_dir)
        .expect("it can be tried again");
    let info = draft.finish(b"").expect("finished");
    assert_eq!(
        info.parts.iter().map(|part| part.tid).collect::<Vec<_>>(),
        [JOB, TASK]
    );
    assert_eq!(
        scratch_dir
            .unpack(&store, &info.id, TASK)
            .expect("unpacked"),
        small_files()
    );
}

#[test]
fn existing_directory_is_not_overwritten() {
    let scratch_dir = ScratchDir::new();
    let store = scratch_dir.open_own_store(StoreLimits::default());
    let info = scratch_dir.write_checkpoint(&store, JOB, 1, &small_files());
    let checkpoint = store.open_checkpoint(&info.id).expect("opened");
    let existing_dir = scratch_dir.write_images("there", &files_from(&[("core.img", b"mine")]));
    assert!(matches!(
        checkpoint.unpack_task(JOB, &existing_dir),
        Err(StoreError::Io { .. })
    ));
    assert_eq!(
        read_files(&existing_dir, |_| ()),
        files_from(&[("core.img", b"mine")])
    );
    assert!(matches!(
        checkpoint.unpack_task(TASK, &scratch_dir.path("new")),
        Err(StoreError::NoTask { .. })
    ));
    assert!(!scratch_dir.path("new").exists());
}

/// Zeros occupy no space in the store or in unpacked files.
#[test]
fn zeros_use_no_space() {
    let scratch_dir = ScratchDir::new();
    let store = scratch_dir.open_own_store(StoreLimits::default());
    let mut memory = vec![0; 48 << 20];
    memory[20 << 20..][..5].copy_from_slice(b"state");
    let info =
        scratch_dir.write_checkpoint(&store, JOB, 1, &files_from(&[("pages-1.img", &memory)]));
    assert_eq!(info.parts[0].images_bytes, 48 << 20);
    assert!(info.bytes < 64 << 10, "{}", info.bytes);
    let unpack_dir = scratch_dir.path("sparse");
    store
        .open_checkpoint(&info.id)
        .expect("opened")
        .unpack_task(JOB, &unpack_dir)
        .expect("unpacked");
    assert_eq!(
        fs::read(unpack_dir.join("pages-1.img")).expect("there"),
        memory
    );
}

#[test]
fn threads_add_tasks_concurrently() {
    let scratch_dir = ScratchDir::new();
    let store = scratch_dir.open_own_store(StoreLimits::default());
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
            let (draft, image_dir) = (
                &draft,
                scratch_dir.write_images(&tid.to_string(), &content(*tid)),
            );
            scope.spawn(move || draft.add_task(*tid, &image_dir).expect("added"));
        }
    });
    let info = draft.finish(b"").expect("finished");
    assert_eq!(
        info.parts.iter().map(|part| part.tid).collect::<Vec<_>>(),
        tasks
    );
    for tid in tasks {
        assert_eq!(
            scratch_dir.unpack(&store, &info.id, tid).expect("unpacked"),
            content(tid)
        );
    }
}

/// The program of the child process, not a test. It writes checkpoints, and prints each step until
/// the process is killed.
#[test]
#[ignore = "child process of another test"]
fn subprocess_that_writes_checkpoints() {
    let Some(scratch_dir) = std::env::var_os(CHILD_DIR_VARIABLE).map(PathBuf::from) else {
        return;
    };
    let store = open_store(
        &scratch_dir,
        StoreLimits {
            checkpoints_max: 2,
            ..StoreLimits::default()
        },
    );
    let image_dir = scratch_dir.join("images");
    for start_second in 0.. {
        let draft = store
            .begin(JOB, Micros::from_secs(start_second))
            .expect("begun");
        println!("step begun");
        draft.add_task(JOB, &image_dir).expect("added");
        println!("step added");
        draft.add_task(TASK, &image_dir).expect("added");
        println!("step added");
        draft.finish(b"meta").expect("finished");
        println!("step finished");
        store.enforce_limits(|_| false).expect("swept");
        println!("step swept");
    }
}

/// Starts a child process. Returns the process and a channel that receives one line for each step
/// that the process has completed.
fn start_child(scratch_dir: &ScratchDir) -> (Child, Receiver<String>) {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command
        .args([
            "--exact",
            "subprocess_that_writes_checkpoints",
            "--ignored",
            "--nocapture",
        ])
        .env(CHILD_DIR_VARIABLE, scratch_dir.0.path());
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

/// Kills a child process after it has completed `step_count` steps.
fn kill_after_steps(step_count: usize, (mut child, receiver): (Child, Receiver<String>)) {
    let steps_result =
        (0..step_count).try_for_each(|_| receiver.recv_timeout(STEP_TIMEOUT).map(drop));
    child.kill().expect("killed");
    child.wait().expect("reaped");
    steps_result.expect("it went on");
}

/// After processes that use the same store concurrently are killed, only complete checkpoints are
/// visible.
#[test]
fn killed_writers_leave_complete_checkpoints() {
    let scratch_dir = ScratchDir::new();
    let content = files_from(&[
        ("pages-1.img", &random_content(2 << 20)),
        ("core.img", b"registers"),
    ]);
    scratch_dir.write_images("images", &content);
    // Kill the processes at every point from the first step to the middle of the third round.
    for step_count in 1..=12 {
        let (first_child, second_child) = (start_child(&scratch_dir), start_child(&scratch_dir));
        kill_after_steps(step_count, first_child);
        kill_after_steps(step_count, second_child);
        let store = scratch_dir.open_own_store(StoreLimits {
            checkpoints_max: 2,
            ..StoreLimits::default()
        });
        let names = read_names(&scratch_dir.path("store"));
        assert!(names.iter().all(|name| !name.starts_with('.')), "{names:?}");
        let (checkpoints, unreadable_entries) = store.list_checkpoints().expect("listed");
        assert!(unreadable_entries.is_empty(), "{unreadable_entries:?}");
        for checkpoint in checkpoints {
            for tid in [JOB, TASK] {
                assert_eq!(
                    scratch_dir
                        .unpack(&store, &checkpoint.id, tid)
                        .expect("unpacked"),
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
    assert!(!read_names(&scratch_dir.path("store")).is_empty());
}

fn read_names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir)
        .expect("readable")
        .map(|entry| entry.expect("readable"));
    entries
        .map(|entry| entry.file_name().into_string().expect("text"))
        .collect()
}
