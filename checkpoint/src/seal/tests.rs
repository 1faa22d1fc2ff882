use super::*;
use crate::sealed_stream::{CHUNK_BYTES, HEAD_BYTES, StreamEncryptor, StreamHead, TAG_BYTES};
use proptest::prelude::*;
use sempa_proto::Tid;
use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::time::Instant;

type Files = BTreeMap<String, Vec<u8>>;

fn test_keys() -> SiteKeys {
    SiteKeys::generate(Path::new("/etc/key")).expect("random")
}

fn test_context() -> SealContext {
    SealContext {
        uid: 1000,
        user_name: "alice".into(),
        tid: Tid::from_raw(0x40001),
    }
}

/// Creates a temporary directory to which other users have no access.
fn private_dir() -> tempfile::TempDir {
    private_dir_in(&std::env::temp_dir())
}

fn private_dir_in(parent: &Path) -> tempfile::TempDir {
    tempfile::Builder::new()
        .permissions(fs::Permissions::from_mode(0o700))
        .tempdir_in(parent)
        .expect("a directory")
}

fn write_files(files: &Files) -> tempfile::TempDir {
    let dir = private_dir();
    for (name, content) in files {
        fs::write(dir.path().join(name), content).expect("written");
    }
    dir
}

fn read_files(dir: &Path) -> Files {
    let entries = fs::read_dir(dir).expect("a directory").map(|entry| {
        let path = entry.expect("read").path();
        let mode = fs::metadata(&path).expect("there").permissions().mode();
        assert_eq!(mode & 0o7777, 0o600);
        let name = path.file_name().expect("a name").to_string_lossy();
        (name.into_owned(), fs::read(&path).expect("read"))
    });
    entries.collect()
}

fn seal(files: &Files, keys: &SiteKeys, context: &SealContext) -> Vec<u8> {
    let mut stream = Vec::new();
    let dir = write_files(files);
    let size = seal_images(dir.path(), &mut stream, keys, context).expect("sealed");
    let image_bytes = files.values().map(|content| content.len() as u64).sum();
    let expected_size = SealedSize {
        files: files.len(),
        image_bytes,
        sealed_bytes: stream.len() as u64,
    };
    assert_eq!(size, expected_size);
    stream
}

/// Unseals a stream and returns its files. After a failure the directory must be empty.
fn unseal_within(
    stream: &[u8],
    keys: &SiteKeys,
    context: &SealContext,
    limits: &UnsealLimits,
) -> Result<Files, SealError> {
    let dir = private_dir();
    let result = unseal_images(stream, dir.path(), keys, context, limits);
    let files = read_files(dir.path());
    match result {
        Ok(size) => {
            assert_eq!(size.sealed_bytes, stream.len() as u64);
            Ok(files)
        }
        Err(error) => {
            assert_eq!(files, Files::new(), "{error}");
            Err(error)
        }
    }
}

fn unseal(stream: &[u8], keys: &SiteKeys, context: &SealContext) -> Result<Files, SealError> {
    unseal_within(stream, keys, context, &UnsealLimits::default())
}

fn is_changed(result: &Result<Files, SealError>) -> bool {
    matches!(result, Err(SealError::Changed(_)))
}

fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|i| (i % 251) as u8).collect()
}

/// Returns files whose stream has several chunks.
fn large_files() -> Files {
    Files::from([
        ("pages-1.img".into(), pattern(2 * CHUNK_BYTES + 5)),
        ("core-1.img".into(), pattern(700)),
        ("empty.img".into(), Vec::new()),
    ])
}

/// Content of files with runs of zeros and of other bytes.
fn any_content() -> impl Strategy<Value = Vec<u8>> {
    let run = (prop::bool::ANY, 0_usize..9000);
    prop::collection::vec(run, 0..6).prop_map(|runs| {
        let runs = runs
            .into_iter()
            .map(|(is_zero_run, bytes)| match is_zero_run {
                true => vec![0; bytes],
                false => pattern(bytes),
            });
        runs.collect::<Vec<_>>().concat()
    })
}

proptest! {
    #[test]
    fn sealed_files_are_unsealed(
        files in prop::collection::btree_map("[a-z0-9][-a-z0-9_.]{0,20}", any_content(), 0..5),
    ) {
        let (keys, context) = (test_keys(), test_context());
        let stream = seal(&files, &keys, &context);
        prop_assert_eq!(unseal(&stream, &keys, &context).expect("unsealed"), files);
    }

    /// Each change of a bit, and each truncation, is refused.
    #[test]
    fn changed_stream_is_refused(
        bit in any::<prop::sample::Index>(),
        length in any::<prop::sample::Index>(),
    ) {
        let (keys, context) = (test_keys(), test_context());
        let stream = seal(&Files::from([("a.img".into(), pattern(500))]), &keys, &context);
        let mut changed_stream = stream.clone();
        let bit = bit.index(stream.len() * 8);
        changed_stream[bit / 8] ^= 1 << (bit % 8);
        prop_assert!(unseal(&changed_stream, &keys, &context).is_err());
        let truncated_stream = &stream[..length.index(stream.len())];
        prop_assert!(is_changed(&unseal(truncated_stream, &keys, &context)));
    }
}

#[test]
fn zeros_are_holes() {
    let (keys, context) = (test_keys(), test_context());
    let files = Files::from([("pages-1.img".into(), vec![0; 4 * CHUNK_BYTES])]);
    let stream = seal(&files, &keys, &context);
    assert!(stream.len() < 2000, "{} bytes", stream.len());
    assert_eq!(unseal(&stream, &keys, &context).expect("unsealed"), files);
}

#[test]
fn other_context_is_refused() {
    let (keys, context) = (test_keys(), test_context());
    let stream = seal(&large_files(), &keys, &context);
    let other_contexts = [
        SealContext {
            uid: 1001,
            ..context.clone()
        },
        SealContext {
            user_name: "bob".into(),
            ..context.clone()
        },
        SealContext {
            tid: Tid::from_raw(0x40002),
            ..context.clone()
        },
    ];
    for other_context in other_contexts {
        let error = unseal(&stream, &keys, &other_context).expect_err("another context");
        let SealError::OtherContext { found, expected } = error else {
            panic!("{error}");
        };
        assert_eq!(
            (*found, *expected),
            (context.clone(), other_context.clone())
        );
        // An attacker writes the expected context into the stream.
        let [old_context, new_context] =
            [&context, &other_context].map(|context| context.encode().expect("short"));
        let forged_stream = [
            &stream[..HEAD_BYTES],
            &(new_context.len() as u16).to_be_bytes(),
            &new_context,
            &stream[HEAD_BYTES + 2 + old_context.len()..],
        ];
        let result = unseal(&forged_stream.concat(), &keys, &other_context);
        assert!(is_changed(&result), "{other_context}: {result:?}");
    }
    let long_name_context = SealContext {
        user_name: "a".repeat(USER_NAME_BYTES_MAX + 1),
        ..context
    };
    assert!(matches!(
        unseal(&stream, &keys, &long_name_context),
        Err(SealError::UserNameTooLong { .. })
    ));
}

#[test]
fn chunks_cannot_be_reordered_repeated_removed_or_mixed() {
    let (keys, context) = (test_keys(), test_context());
    let [stream, other_stream] = [(); 2].map(|()| seal(&large_files(), &keys, &context));
    let head_bytes = HEAD_BYTES + 2 + context.encode().expect("short").len();
    let split = |stream: &[u8]| -> (Vec<u8>, Vec<Vec<u8>>) {
        let (head, chunks) = stream.split_at(head_bytes);
        let chunks = chunks.chunks(CHUNK_BYTES + TAG_BYTES).map(<[u8]>::to_vec);
        (head.to_vec(), chunks.collect())
    };
    let ((head, mut chunks), (_, other_chunks)) = (split(&stream), split(&other_stream));
    assert_eq!(chunks.len(), 3);
    chunks.extend(other_chunks);
    let join = |order: &[usize]| {
        let chunks = order.iter().map(|index| &*chunks[*index]);
        std::iter::once(&*head)
            .chain(chunks)
            .collect::<Vec<_>>()
            .concat()
    };
    assert_eq!(
        unseal(&join(&[0, 1, 2]), &keys, &context).expect("whole"),
        large_files()
    );
    for order in [
        &[][..],
        &[0],
        &[0, 1],
        &[2],
        &[1, 0, 2],
        &[0, 0, 2],
        &[0, 1, 1, 2],
        &[0, 1, 2, 2],
        &[3, 4, 5],
        &[0, 4, 2],
        &[0, 1, 5],
    ] {
        assert!(
            is_changed(&unseal(&join(order), &keys, &context)),
            "{order:?}"
        );
    }
    for extension in [&[0][..], &stream] {
        let extended_stream = [&stream, extension].concat();
        assert!(is_changed(&unseal(&extended_stream, &keys, &context)));
    }
}

#[test]
fn previous_keys_open() {
    let context = test_context();
    let dir = private_dir();
    let path = dir.path().join("site.key");
    let first_id = SiteKeys::create_file(&path).expect("created");
    let first_keys = SiteKeys::load(&path).expect("loaded");
    assert_eq!(first_keys.current_id(), first_id);
    let files = Files::from([("a.img".into(), pattern(500))]);
    let stream = seal(&files, &first_keys, &context);
    let second_id = SiteKeys::rotate_file(&path).expect("rotated");
    let both_keys = SiteKeys::load(&path).expect("loaded");
    assert_eq!(
        (both_keys.current_id(), both_keys.previous_count()),
        (second_id, 1)
    );
    assert_eq!(
        unseal(&stream, &both_keys, &context).expect("previous"),
        files
    );
    let new_stream = seal(&files, &both_keys, &context);
    let error = unseal(&new_stream, &first_keys, &context).expect_err("the new key");
    assert!(
        matches!(error, SealError::OtherKey { found, current } if found == second_id && current == first_id),
        "{error}"
    );
    assert_eq!(
        SiteKeys::forget_previous_file(&path).expect("changed"),
        second_id
    );
    let second_keys = SiteKeys::load(&path).expect("loaded");
    assert!(matches!(
        unseal(&stream, &second_keys, &context),
        Err(SealError::OtherKey { .. })
    ));
    // An attacker writes the identifier of a known key into the stream.
    let mut forged_stream = stream;
    forged_stream[..HEAD_BYTES - 32].copy_from_slice(&new_stream[..HEAD_BYTES - 32]);
    assert!(is_changed(&unseal(&forged_stream, &second_keys, &context)));
    let names: Vec<_> = fs::read_dir(dir.path()).expect("there").collect();
    assert_eq!(names.len(), 1, "no temporary file is left: {names:?}");
}

#[test]
fn existing_key_file_is_not_replaced() {
    let dir = private_dir();
    let path = dir.path().join("new-directory/site.key");
    assert!(matches!(
        SiteKeys::load(&path),
        Err(SiteKeyError::Missing { .. })
    ));
    assert!(matches!(
        SiteKeys::rotate_file(&path),
        Err(SiteKeyError::Missing { .. })
    ));
    let key_id = SiteKeys::create_file(&path).expect("created");
    let error = SiteKeys::create_file(&path).expect_err("it exists");
    assert!(error.to_string().contains("site-key rotate"), "{error}");
    assert_eq!(SiteKeys::load(&path).expect("loaded").current_id(), key_id);
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("set");
}

fn load_error(path: &Path) -> String {
    SiteKeys::load(path).expect_err("not usable").to_string()
}

#[test]
fn accessible_key_file_is_refused() {
    let dir = private_dir();
    let path = dir.path().join("site.key");
    SiteKeys::create_file(&path).expect("created");
    for mode in [0o640, 0o604, 0o620, 0o601] {
        set_mode(&path, mode);
        let error = load_error(&path);
        assert!(
            error.contains("chmod 600") && error.contains("mode 0"),
            "{error}"
        );
        assert!(SiteKeys::rotate_file(&path).is_err());
    }
    set_mode(&path, 0o400);
    SiteKeys::load(&path).expect("readable by its owner only");
    for mode in [0o720, 0o702] {
        set_mode(dir.path(), mode);
        let error = load_error(&path);
        assert!(error.contains("chmod go-w"), "{error}");
        assert!(SiteKeys::create_file(&dir.path().join("other.key")).is_err());
    }
    set_mode(dir.path(), 0o700);
    let link = dir.path().join("link.key");
    symlink(&path, &link).expect("linked");
    assert!(load_error(&link).contains("is a symbolic link"));
    let dir_link = dir.path().join("link");
    symlink(dir.path(), &dir_link).expect("linked");
    assert!(load_error(&dir_link.join("site.key")).contains("symbolic link"));
    assert!(load_error(&dir.path().join("x/../site.key")).contains("site.key"));
    let pipe = dir.path().join("pipe.key");
    nix::unistd::mkfifo(&pipe, Mode::S_IRUSR).expect("made");
    assert!(load_error(&pipe).contains("not a regular file"));
    let long_file = dir.path().join("long.key");
    fs::write(&long_file, "#".repeat((64 << 10) + 1)).expect("written");
    set_mode(&long_file, 0o600);
    assert!(load_error(&long_file).contains("more than 65536 bytes"));
    fs::write(&long_file, [0xff; 100]).expect("written");
    assert!(load_error(&long_file).contains("not valid"));
}

#[test]
#[ignore = "system tier: needs root to change the owner of files"]
fn key_file_of_other_user_is_refused() {
    let dir = private_dir();
    let path = dir.path().join("site.key");
    SiteKeys::create_file(&path).expect("created");
    std::os::unix::fs::chown(&path, Some(65534), None).expect("root");
    assert!(load_error(&path).contains("belongs to user 65534"));
    std::os::unix::fs::chown(&path, Some(0), None).expect("root");
    SiteKeys::load(&path).expect("loaded");
    std::os::unix::fs::chown(dir.path(), Some(65534), None).expect("root");
    assert!(load_error(&path).contains("belongs to user 65534"));
}

#[test]
fn limits_are_enforced() {
    let (keys, context) = (test_keys(), test_context());
    let files = Files::from([
        ("a.img".into(), pattern(500)),
        ("b.img".into(), vec![0; 500]),
    ]);
    let stream = seal(&files, &keys, &context);
    let exact_limits = UnsealLimits {
        files_max: 2,
        image_bytes_max: 1000,
    };
    let unseal_within = |limits| unseal_within(&stream, &keys, &context, &limits);
    assert_eq!(unseal_within(exact_limits).expect("within"), files);
    for limits in [
        UnsealLimits {
            files_max: 1,
            ..exact_limits
        },
        UnsealLimits {
            image_bytes_max: 999,
            ..exact_limits
        },
        UnsealLimits {
            image_bytes_max: 499,
            ..exact_limits
        },
    ] {
        let result = unseal_within(limits);
        assert!(
            matches!(result, Err(SealError::LimitExceeded { .. })),
            "{result:?}"
        );
    }
}

/// Seals records that a correct sealer does not write.
fn seal_records(records: &[u8], keys: &SiteKeys, context: &SealContext) -> Vec<u8> {
    let head = StreamHead::generate(keys.current()).expect("random");
    let context = context.encode().expect("short");
    let mut stream = head.as_bytes().to_vec();
    stream.extend((context.len() as u16).to_be_bytes());
    stream.extend(&context);
    let mut encryptor =
        StreamEncryptor::new(keys.current(), head, &context, &mut stream).expect("started");
    encryptor.append(records).expect("sealed");
    encryptor.finish().expect("sealed");
    stream
}

/// Even an authentic stream creates no file outside of the directory, and must be consistent.
#[test]
fn invalid_records_are_refused() {
    let (keys, context) = (test_keys(), test_context());
    let file = |name: &str| [&[1, name.len() as u8], name.as_bytes()].concat();
    let data = |bytes: &[u8]| [&[2][..], &(bytes.len() as u32).to_le_bytes(), bytes].concat();
    let zeros = |bytes: u64| [&[3][..], &bytes.to_le_bytes()].concat();
    let file_end = |bytes: u64| [&[4][..], &bytes.to_le_bytes()].concat();
    let end =
        |files: u32, bytes: u64| [&[0][..], &files.to_le_bytes(), &bytes.to_le_bytes()].concat();
    let unseal_records = |records: &[Vec<u8>]| {
        let stream = seal_records(&records.concat(), &keys, &context);
        unseal(&stream, &keys, &context)
    };
    let valid_records = [file("a"), data(b"x"), zeros(2), file_end(3), end(1, 3)];
    let files = unseal_records(&valid_records).expect("valid");
    assert_eq!(files, Files::from([("a".into(), b"x\0\0".to_vec())]));
    for name in [
        "",
        ".",
        "..",
        "../a",
        "a/b",
        "/a",
        ".a",
        "a b",
        "a\0",
        "ä",
        &"a".repeat(101),
    ] {
        let result = unseal_records(&[file(name), file_end(0), end(1, 0)]);
        assert!(is_changed(&result), "{name:?}");
    }
    for records in [
        vec![],
        vec![vec![9]],
        vec![end(1, 0)],
        vec![end(0, 0), end(0, 0)],
        vec![file("a"), end(1, 0)],
        vec![file("a"), file_end(0)],
        vec![file("a"), data(b"x"), file_end(2), end(1, 1)],
        vec![file("a"), data(b"x"), file_end(1), end(1, 2)],
        vec![file("a"), data(b""), file_end(0), end(1, 0)],
        vec![file("a"), zeros(0), file_end(0), end(1, 0)],
        vec![file("a"), file("b"), file_end(0), end(2, 0)],
        vec![file_end(0), end(0, 0)],
        vec![data(b"x"), end(0, 0)],
    ] {
        assert!(is_changed(&unseal_records(&records)), "{records:?}");
    }
    let result = unseal_records(&[file("a"), zeros(u64::MAX), file_end(u64::MAX)]);
    assert!(matches!(result, Err(SealError::LimitExceeded { .. })));
    let repeated_file = [file("a"), file_end(0), file("a"), file_end(0), end(2, 0)];
    assert!(matches!(
        unseal_records(&repeated_file),
        Err(SealError::WriteImage { .. })
    ));
}

/// An output that fails after a number of bytes, like a full disk.
struct LimitedOutput {
    remaining_bytes: usize,
}

impl Write for LimitedOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written_bytes = bytes.len().min(self.remaining_bytes);
        self.remaining_bytes -= written_bytes;
        match written_bytes {
            0 => Err(io::ErrorKind::StorageFull.into()),
            _ => Ok(written_bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn failed_output_is_reported() {
    let (keys, context) = (test_keys(), test_context());
    let dir = write_files(&large_files());
    let stream_bytes = seal(&large_files(), &keys, &context).len();
    for remaining_bytes in [0, 1, 100, CHUNK_BYTES, stream_bytes - 1] {
        let output = LimitedOutput { remaining_bytes };
        let result = seal_images(dir.path(), output, &keys, &context);
        assert!(
            matches!(result, Err(SealError::WriteStream(_))),
            "{result:?}"
        );
    }
}

#[test]
fn failed_sealer_cannot_finish() {
    let (keys, context) = (test_keys(), test_context());
    let mut stream = Vec::new();
    let mut sealer = ImageSealer::new(&mut stream, &keys, &context).expect("started");
    assert_eq!(
        sealer.add_file("a.img", &b"content"[..]).expect("sealed"),
        7
    );
    assert!(sealer.add_file("../a.img", &b"content"[..]).is_err());
    assert!(matches!(
        sealer.add_file("b.img", &b"content"[..]),
        Err(SealError::Incomplete)
    ));
    assert!(matches!(sealer.finish(), Err(SealError::Incomplete)));
    assert!(is_changed(&unseal(&stream, &keys, &context)));
}

#[test]
fn unsuitable_directory_is_refused() {
    let (keys, context) = (test_keys(), test_context());
    let files = Files::from([("a.img".into(), pattern(500))]);
    let stream = seal(&files, &keys, &context);
    let dir = write_files(&files);
    let unseal =
        |dir: &Path| unseal_images(&*stream, dir, &keys, &context, &UnsealLimits::default());
    let result = unseal(dir.path());
    assert!(matches!(result, Err(SealError::DirectoryNotEmpty { .. })));
    assert_eq!(
        fs::read(dir.path().join("a.img")).expect("unchanged"),
        pattern(500)
    );
    symlink("/etc/hostname", dir.path().join("b.img")).expect("linked");
    let result = seal_images(dir.path(), Vec::new(), &keys, &context);
    assert!(matches!(result, Err(SealError::UnsuitableImage { .. })));
    let link = dir.path().join("link");
    symlink(dir.path(), &link).expect("linked");
    assert!(matches!(
        unseal(&link),
        Err(SealError::UnsafeDirectory { .. })
    ));
    let shared_dir = private_dir();
    set_mode(shared_dir.path(), 0o770);
    let result = unseal(shared_dir.path());
    assert!(matches!(result, Err(SealError::UnsafeDirectory { .. })));
    let result = seal_images(shared_dir.path(), Vec::new(), &keys, &context);
    assert!(matches!(result, Err(SealError::UnsafeDirectory { .. })));
}

#[test]
#[ignore = "system tier: needs root to mount a small file system"]
fn full_disk_leaves_nothing() {
    let (keys, context) = (test_keys(), test_context());
    let stream = seal(&large_files(), &keys, &context);
    // The mount is visible in the namespace of this thread only, and ends with the thread.
    let thread = std::thread::spawn(move || {
        let dir = private_dir();
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).expect("root");
        let mount = |source: &str, path: &Path, flags, options: Option<&str>| {
            nix::mount::mount(Some(source), path, Some("tmpfs"), flags, options).expect("root");
        };
        let private = nix::mount::MsFlags::MS_REC | nix::mount::MsFlags::MS_PRIVATE;
        mount("none", Path::new("/"), private, None);
        let options = Some("size=1m,mode=0700");
        mount("none", dir.path(), nix::mount::MsFlags::empty(), options);
        let result = unseal_images(
            &*stream,
            dir.path(),
            &keys,
            &context,
            &UnsealLimits::default(),
        );
        assert!(
            matches!(&result, Err(SealError::WriteImage { cause, .. })
                if cause.kind() == io::ErrorKind::StorageFull),
            "{result:?}"
        );
        assert_eq!(read_files(dir.path()), Files::new());
    });
    thread.join().expect("it holds");
}

/// Prints the throughput of sealing and unsealing.
#[test]
#[ignore = "system tier: a measurement"]
fn throughput_is_measured() {
    let (keys, context) = (test_keys(), test_context());
    let image_bytes = 64 << 20;
    let mut random_state = 1_u64;
    let content: Vec<u8> = std::iter::repeat_with(|| {
        random_state ^= random_state << 13;
        random_state ^= random_state >> 7;
        random_state ^= random_state << 17;
        random_state.to_le_bytes()
    })
    .take(image_bytes / 8)
    .flatten()
    .collect();
    let source_dir = private_dir_in(Path::new("/dev/shm"));
    fs::write(source_dir.path().join("pages-1.img"), &content).expect("written");
    let mut stream = Vec::with_capacity(image_bytes + (1 << 20));
    for _ in 0..3 {
        stream.clear();
        let start = Instant::now();
        seal_images(source_dir.path(), &mut stream, &keys, &context).expect("sealed");
        let seal_seconds = start.elapsed().as_secs_f64();
        let target_dir = private_dir_in(Path::new("/dev/shm"));
        let start = Instant::now();
        let limits = UnsealLimits::default();
        unseal_images(&*stream, target_dir.path(), &keys, &context, &limits).expect("unsealed");
        let unseal_seconds = start.elapsed().as_secs_f64();
        let megabytes = image_bytes as f64 / 1e6;
        println!(
            "seal {:.0} MB/s, unseal {:.0} MB/s",
            megabytes / seal_seconds,
            megabytes / unseal_seconds
        );
    }
    assert!(stream.len() > image_bytes);
}
