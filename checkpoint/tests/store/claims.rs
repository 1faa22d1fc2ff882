//! The claims of jobs.

use super::{JOB, OTHER_JOB, ScratchDir, small_files};
use checkpoint::store::{CheckpointStore, StoreError, StoreLimits};
use sempa_proto::Micros;
use sempa_proto::checkpoint::ClaimKey;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

const KEY: ClaimKey = ClaimKey {
    job: JOB,
    origin: Micros(77),
};

fn write(store: &CheckpointStore, key: ClaimKey, content: &[u8]) {
    store
        .update_claim(key, |_| Some(content.to_vec()))
        .expect("written");
}

fn read(store: &CheckpointStore, key: ClaimKey) -> Result<Option<Vec<u8>>, StoreError> {
    let mut content = None;
    store.update_claim(key, |claim| {
        content = claim.map(<[u8]>::to_vec);
        None
    })?;
    Ok(content)
}

/// Returns the paths of the claim files of the store.
fn claim_files(scratch_dir: &ScratchDir) -> Vec<PathBuf> {
    let entries = fs::read_dir(scratch_dir.path("store")).expect("a store");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    paths
        .filter(|path| path.display().to_string().contains("claim-"))
        .collect()
}

/// Each job has its own claim, which processes replace one after the other. Claims are no
/// checkpoints and no foreign files.
#[test]
fn claims_are_kept_for_each_job() {
    let scratch_dir = ScratchDir::new();
    let store = scratch_dir.open_own_store(StoreLimits::default());
    let other_origin = ClaimKey {
        origin: Micros(78),
        ..KEY
    };
    assert_eq!(read(&store, KEY).expect("read"), None);
    write(&store, KEY, b"first");
    write(&store, other_origin, b"other");
    let second_process_store = scratch_dir.open_own_store(StoreLimits::default());
    assert_eq!(
        read(&second_process_store, KEY).expect("read").as_deref(),
        Some(&b"first"[..])
    );
    write(&second_process_store, KEY, b"second");
    let mut claims = store.read_claims().expect("read");
    claims.sort();
    assert_eq!(
        claims,
        [(KEY, b"second".to_vec()), (other_origin, b"other".to_vec())]
    );
    let (checkpoints, unreadable_entries) = store.list_checkpoints().expect("listed");
    assert!(
        checkpoints.is_empty() && unreadable_entries.is_empty(),
        "{unreadable_entries:?}"
    );
    for path in claim_files(&scratch_dir) {
        let mode = fs::metadata(&path).expect("there").permissions().mode();
        assert_eq!(mode & 0o7777, 0o600, "{}", path.display());
    }
}

/// Nobody without the key can write a claim, and none counts for another job.
#[test]
fn changed_and_exchanged_claims_are_refused() {
    let scratch_dir = ScratchDir::new();
    let store = scratch_dir.open_own_store(StoreLimits::default());
    write(&store, KEY, b"content");
    let [path] = &claim_files(&scratch_dir)[..] else {
        panic!("one claim")
    };
    let sealed_bytes = fs::read(path).expect("there");
    assert!(!sealed_bytes.windows(7).any(|window| window == b"content"));
    for index in [0, 20, sealed_bytes.len() - 1] {
        let mut changed_bytes = sealed_bytes.clone();
        changed_bytes[index] ^= 1;
        fs::write(path, changed_bytes).expect("written");
        read(&store, KEY).expect_err("it was changed");
    }
    let other_job = ClaimKey {
        job: OTHER_JOB,
        ..KEY
    };
    write(&store, other_job, b"other");
    let other_path = claim_files(&scratch_dir)
        .into_iter()
        .find(|other_path| other_path != path)
        .expect("another claim");
    fs::copy(other_path, path).expect("copied");
    assert!(matches!(read(&store, KEY), Err(StoreError::Changed { .. })));
}

/// A writer that dies leaves the claim as it was, or a file that the next writer replaces.
#[test]
fn unfinished_claim_does_not_count() {
    let scratch_dir = ScratchDir::new();
    let store = scratch_dir.open_own_store(StoreLimits::default());
    write(&store, KEY, b"content");
    let [path] = &claim_files(&scratch_dir)[..] else {
        panic!("one claim")
    };
    let new_path = PathBuf::from(format!("{}.new", path.display()));
    fs::write(&new_path, b"half of a cl").expect("written");
    let (_, unreadable_entries) = store.list_checkpoints().expect("listed");
    assert!(unreadable_entries.is_empty(), "{unreadable_entries:?}");
    assert_eq!(
        read(&store, KEY).expect("read").as_deref(),
        Some(&b"content"[..])
    );
    write(&store, KEY, b"next");
    assert_eq!(
        read(&store, KEY).expect("read").as_deref(),
        Some(&b"next"[..])
    );
    assert!(!new_path.exists());
}

/// A claim stays as long as its job has checkpoints, or runs.
#[test]
fn claim_is_removed_with_the_last_checkpoint() {
    let scratch_dir = ScratchDir::new();
    let store = scratch_dir.open_own_store(StoreLimits::default());
    let id = scratch_dir
        .write_checkpoint(&store, JOB, 1, &small_files())
        .id;
    write(&store, KEY, b"content");
    store.remove_unneeded_claim(KEY, |_| true).expect("kept");
    assert_eq!(claim_files(&scratch_dir).len(), 1);
    store.remove_checkpoint(&id).expect("removed");
    store.remove_unneeded_claim(KEY, |_| false).expect("kept");
    assert_eq!(claim_files(&scratch_dir).len(), 1);
    store.remove_unneeded_claim(KEY, |_| true).expect("removed");
    assert!(claim_files(&scratch_dir).is_empty());
}
