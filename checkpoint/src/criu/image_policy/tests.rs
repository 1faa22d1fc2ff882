//! Tests with the images of a real task: CRIU 4.2.1 dumped a Python program of the user 65534 in
//! a PID and a mount namespace of its own. `testdata/user-images/README.md` describes the task. The
//! content of memory is left out, because it is not checked.

use super::*;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};

const UID: u32 = 65534;

fn test_policy() -> RestorePolicy {
    RestorePolicy {
        identity: UserIdentity {
            uid: UID,
            gid: UID,
            groups: vec![100, 101],
        },
        limits: RestoreLimits::default(),
        requires_no_new_privs: true,
        bounding_set: u64::MAX,
        other_files: BTreeSet::new(),
    }
}

/// A field of a message: number, wire type, value.
type RawField = (u64, RawValue);

#[derive(Clone, Debug, PartialEq)]
enum RawValue {
    Varint(u64),
    Fixed64([u8; 8]),
    Bytes(Vec<u8>),
}

fn read_varint(bytes: &mut &[u8]) -> u64 {
    let mut value = 0;
    for shift in (0..).step_by(7) {
        let (byte, rest) = bytes.split_first().expect("whole");
        *bytes = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            break;
        }
    }
    value
}

fn write_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn parse(mut bytes: &[u8]) -> Vec<RawField> {
    let mut fields = Vec::new();
    while !bytes.is_empty() {
        let key = read_varint(&mut bytes);
        let value = match key & 7 {
            0 => RawValue::Varint(read_varint(&mut bytes)),
            1 => {
                let (value, rest) = bytes.split_first_chunk().expect("whole");
                bytes = rest;
                RawValue::Fixed64(*value)
            }
            2 => {
                let length = read_varint(&mut bytes) as usize;
                let (value, rest) = bytes.split_at(length);
                bytes = rest;
                RawValue::Bytes(value.to_vec())
            }
            other => panic!("wire type {other}"),
        };
        fields.push((key >> 3, value));
    }
    fields
}

fn encode(fields: &[RawField]) -> Vec<u8> {
    let mut out = Vec::new();
    for (number, value) in fields {
        match value {
            RawValue::Varint(value) => {
                write_varint(&mut out, number << 3);
                write_varint(&mut out, *value);
            }
            RawValue::Fixed64(value) => {
                write_varint(&mut out, number << 3 | 1);
                out.extend(value);
            }
            RawValue::Bytes(value) => {
                write_varint(&mut out, number << 3 | 2);
                write_varint(&mut out, value.len() as u64);
                out.extend(value);
            }
        }
    }
    out
}

fn varint(number: u64, value: u64) -> RawField {
    (number, RawValue::Varint(value))
}

fn bytes(number: u64, value: &[u8]) -> RawField {
    (number, RawValue::Bytes(value.to_vec()))
}

/// A set of images, by name.
#[derive(Clone)]
struct ImageSet(BTreeMap<String, Vec<u8>>);

impl ImageSet {
    fn load() -> Self {
        Self::load_from("user-images")
    }

    fn load_from(name: &str) -> Self {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("testdata")
            .join(name);
        let entries = fs::read_dir(dir).expect("test data").map(|entry| {
            let path = entry.expect("read").path();
            let name = path
                .file_name()
                .expect("a name")
                .to_string_lossy()
                .into_owned();
            (name, fs::read(&path).expect("read"))
        });
        Self(entries.filter(|(name, _)| name.ends_with(".img")).collect())
    }

    /// Changes the message at `path` in the entry `entry` of an image. The path consists of field
    /// numbers; a repeated field means its first occurrence.
    fn alter(
        mut self,
        name: &str,
        entry: usize,
        path: &[u64],
        change: impl FnOnce(&mut Vec<RawField>),
    ) -> Self {
        let image = self.0.get_mut(name).expect("the image exists");
        let mut offset = if name == "inventory.img" { 4 } else { 8 };
        for _ in 0..entry {
            offset += 4 + entry_length(image, offset);
        }
        let length = entry_length(image, offset);
        let message = alter_message(&image[offset + 4..][..length], path, change);
        let replacement = [&(message.len() as u32).to_le_bytes()[..], &message].concat();
        image.splice(offset..offset + 4 + length, replacement);
        self
    }

    /// Sets the number in the field `field` of the message at `path`.
    fn set(self, name: &str, entry: usize, path: &[u64], field: u64, value: u64) -> Self {
        self.alter(name, entry, path, |fields| {
            fields.retain(|(number, _)| *number != field);
            fields.push(varint(field, value));
        })
    }

    fn add(self, name: &str, entry: usize, path: &[u64], field: RawField) -> Self {
        self.alter(name, entry, path, |fields| fields.push(field))
    }

    /// Returns the number of the entry of `files.img` that describes a file of the kind `kind`
    /// whose description satisfies `is_meant`.
    fn file(&self, kind: u64, is_meant: impl Fn(&[RawField]) -> bool) -> (usize, u64) {
        let image = &self.0["files.img"];
        let mut offset = 8;
        for entry in 0.. {
            let length = entry_length(image, offset);
            let fields = parse(&image[offset + 4..][..length]);
            let description = fields.iter().find_map(|(number, value)| match value {
                RawValue::Bytes(value) => Some((*number, parse(value))),
                _ => None,
            });
            let (number, description) = description.expect("a description");
            if fields.contains(&varint(1, kind)) && is_meant(&description) {
                return (entry, number);
            }
            offset += 4 + length;
        }
        unreachable!("the file exists")
    }

    fn path_file(&self, path: &str) -> (usize, u64) {
        self.file(1, |description| {
            description.contains(&bytes(6, path.as_bytes()))
        })
    }

    fn write(&self) -> tempfile::TempDir {
        let dir = tempfile::tempdir().expect("a directory");
        for (name, image) in &self.0 {
            fs::write(dir.path().join(name), image).expect("written");
        }
        dir
    }

    fn verify_with(&self, policy: &RestorePolicy) -> Result<OpenedFiles, ImageViolation> {
        verify_image_bytes(&self.0, policy)
    }

    fn verify(&self) -> Result<OpenedFiles, ImageViolation> {
        self.verify_with(&test_policy())
    }

    fn violation(&self) -> ImageViolation {
        match self.verify() {
            Ok(_) => panic!("the images are accepted"),
            Err(violation) => violation,
        }
    }
}

fn entry_length(image: &[u8], offset: usize) -> usize {
    let length = image[offset..].first_chunk().expect("an entry");
    u32::from_le_bytes(*length) as usize
}

fn alter_message(message: &[u8], path: &[u64], change: impl FnOnce(&mut Vec<RawField>)) -> Vec<u8> {
    let mut fields = parse(message);
    match path.split_first() {
        None => change(&mut fields),
        Some((first, rest)) => {
            let field = fields.iter_mut().find(|(number, _)| number == first);
            let (_, RawValue::Bytes(inner)) = field.expect("the field exists") else {
                panic!("{first} is not a message");
            };
            *inner = alter_message(inner, rest, change);
        }
    }
    encode(&fields)
}

/// Path of the credentials in the image of a thread: `thread_core`, `creds`.
const CREDENTIALS: [u64; 2] = [5, 10];
/// Path of the properties of a process in the image of its main thread: `tc`.
const TASK: [u64; 1] = [3];
/// The images of the main threads of two processes, and of another thread.
const CORES: [&str; 3] = ["core-2.img", "core-3.img", "core-5.img"];

#[test]
fn images_of_a_real_task_are_accepted() {
    ImageSet::load_from("small-user-images")
        .verify()
        .expect("harmless");
    let images = ImageSet::load();
    let opened_files = images.verify().expect("harmless");
    let result = verify_images(images.write().path(), &test_policy());
    assert_eq!(result.as_ref(), Ok(&opened_files), "read from a directory");
    let opened_files = opened_files.files;
    let access = |path: &str| -> Vec<FileAccess> {
        let files = opened_files
            .iter()
            .filter(|file| file.path == Path::new(path));
        files.map(|file| file.access).collect()
    };
    assert_eq!(access("/"), [FileAccess::Enter]);
    assert_eq!(access("/dev/null"), [FileAccess::Read]);
    assert_eq!(access("/proc/meminfo"), [FileAccess::Read]);
    assert_eq!(access("/tmp/sempa-task/append.txt"), [FileAccess::Write]);
    // The file is mapped privately, mapped shared, and open.
    assert_eq!(access("/tmp/sempa-task/plain.txt"), [FileAccess::ReadWrite]);
    assert_eq!(access("/tmp/sempa-task/ghost.txt"), [FileAccess::Create]);
    assert_eq!(access("/tmp/sempa-task/sock"), [FileAccess::Create]);
    assert_eq!(access("/tmp/sempa-task/fifo"), [FileAccess::ReadWrite]);
    // The directory is open, watched, and the working directory.
    assert_eq!(
        access("/tmp/sempa-task"),
        [FileAccess::Enter, FileAccess::Read]
    );
    assert_eq!(
        access("/usr/bin/python3.11"),
        [FileAccess::Read, FileAccess::Execute]
    );
    assert_eq!(access("/dev/ptmx"), [], "pseudo terminals have numbers");
}

#[test]
fn other_ids_are_refused() {
    let images = ImageSet::load();
    for core in CORES {
        for field in [1, 3, 5, 7] {
            let violation = images
                .clone()
                .set(core, 0, &CREDENTIALS, field, 0)
                .violation();
            assert!(
                matches!(
                    violation,
                    ImageViolation::OtherUser {
                        found: 0,
                        expected: UID,
                        ..
                    }
                ),
                "{core} {field}: {violation}"
            );
        }
        for field in [2, 4, 6, 8] {
            let violation = images
                .clone()
                .set(core, 0, &CREDENTIALS, field, 0)
                .violation();
            assert!(
                matches!(violation, ImageViolation::OtherGroup { found: 0, .. }),
                "{core} {field}: {violation}"
            );
        }
        let images = images.clone().add(core, 0, &CREDENTIALS, varint(14, 0));
        assert!(matches!(
            images.violation(),
            ImageViolation::ForeignGroup { gid: 0, .. }
        ));
    }
    let images = images.add(CORES[0], 0, &CREDENTIALS, varint(14, u64::from(UID)));
    images
        .verify()
        .expect("the primary group is a group of the user");
}

#[test]
fn privileges_are_refused() {
    let images = ImageSet::load();
    for core in CORES {
        for field in [9, 10, 11, 19] {
            let images = images.clone().add(core, 0, &CREDENTIALS, varint(field, 1));
            let violation = images.violation();
            assert!(
                matches!(violation, ImageViolation::Capabilities { .. }),
                "{field}"
            );
        }
        let secure_images = images.clone().set(core, 0, &CREDENTIALS, 13, 0x10);
        assert!(matches!(
            secure_images.violation(),
            ImageViolation::SecureBits { bits: 0x10, .. }
        ));
        for field in [15, 16, 17] {
            let images = images
                .clone()
                .add(core, 0, &CREDENTIALS, bytes(field, b"unconfined"));
            let violation = images.violation();
            assert!(
                matches!(violation, ImageViolation::SecurityProfile { .. }),
                "{field}"
            );
        }
        let privileged_images = images.clone().set(core, 0, &CREDENTIALS, 18, 0);
        assert!(matches!(
            privileged_images.violation(),
            ImageViolation::NewPrivileges { .. }
        ));
        // The main thread has a seccomp filter, which needs no_new_privs.
        let policy = RestorePolicy {
            requires_no_new_privs: false,
            ..test_policy()
        };
        let has_filter = core == "core-2.img";
        let result = privileged_images.verify_with(&policy);
        assert_eq!(result.is_err(), has_filter, "{core}");
    }
    let images = images.set(CORES[0], 0, &CREDENTIALS, 12, 1);
    images
        .verify()
        .expect("the bounding set permits everything");
    let policy = RestorePolicy {
        bounding_set: 0,
        ..test_policy()
    };
    let violation = images.verify_with(&policy).expect_err("no bounding set");
    assert!(matches!(
        violation,
        ImageViolation::Capabilities {
            set: "bounding",
            ..
        }
    ));
}

#[test]
fn limits_and_priorities_are_checked() {
    let images = ImageSet::load();
    let mut policy = test_policy();
    policy.limits.resource_limits_max[0] = 5;
    let violation = images.verify_with(&policy).expect_err("unlimited");
    assert!(
        matches!(
            violation,
            ImageViolation::ResourceLimit {
                limit: "RLIMIT_CPU",
                found: u64::MAX,
                allowed: 5,
                ..
            }
        ),
        "{violation}"
    );
    let mut policy = test_policy();
    policy.limits.resource_limits_max[8] = 4096;
    let violation = images.verify_with(&policy).expect_err("locked memory");
    assert!(matches!(
        violation,
        ImageViolation::ResourceLimit {
            limit: "RLIMIT_MEMLOCK",
            ..
        }
    ));
    let incomplete_images = images.clone().alter(CORES[0], 0, &[3, 8], |limits| {
        limits.pop();
    });
    assert!(matches!(
        incomplete_images.violation(),
        ImageViolation::Damaged { .. }
    ));
    let no_limits = images.clone().alter(CORES[0], 0, &TASK, |task| {
        task.retain(|(number, _)| *number != 8);
    });
    assert!(matches!(
        no_limits.violation(),
        ImageViolation::Damaged { .. }
    ));
    let is_privilege =
        |images: ImageSet| matches!(images.violation(), ImageViolation::Privilege { .. });
    // The nice value is encoded with a zigzag: 1 is -1.
    for (field, value) in [(3, 1), (4, 1), (4, 2), (4, 6), (4, 7)] {
        let images = images.clone().set(CORES[2], 0, &[5], field, value);
        assert!(is_privilege(images), "{field} {value}");
    }
    for policy in [3, 5] {
        let images = images.clone().set(CORES[2], 0, &[5], 4, policy);
        images.verify().expect("an ordinary policy");
    }
    assert!(is_privilege(images.clone().set(CORES[0], 0, &TASK, 13, 0)));
    let minus_one = u64::MAX;
    assert!(is_privilege(
        images.clone().set(CORES[0], 0, &TASK, 14, minus_one)
    ));
    assert!(is_privilege(images.clone().set(CORES[0], 0, &TASK, 1, 9)));
    // Field 7 are the timers, field 4 of them a POSIX timer, field 2 of it the clock.
    assert!(is_privilege(images.clone().set(
        CORES[0],
        0,
        &[3, 7, 4],
        2,
        8
    )));
    let zombie_with_thread = images.add(
        "core-4.img",
        0,
        &[],
        bytes(5, &encode(&[varint(1, 0), varint(2, 0)])),
    );
    assert!(is_privilege(zombie_with_thread));
}

#[test]
fn counts_are_limited() {
    let images = ImageSet::load();
    type Change = fn(&mut RestoreLimits);
    let changes: [(Change, &str); 8] = [
        (|limits| limits.processes_max = 2, "processes"),
        (|limits| limits.threads_max = 4, "threads"),
        (|limits| limits.files_max = 10, "open files"),
        (|limits| limits.files_max = 58, "descriptors"),
        (|limits| limits.mappings_max = 10, "memory mappings"),
        (|limits| limits.pipe_bytes_max = 65_535, "bytes in a pipe"),
        (
            |limits| limits.socket_bytes_max = 212_991,
            "bytes in the buffer of a socket",
        ),
        (
            |limits| limits.aio_requests_max = 0,
            "requests of asynchronous input and output",
        ),
    ];
    for (change, expected) in changes {
        let mut policy = test_policy();
        change(&mut policy.limits);
        let result = images.verify_with(&policy);
        assert!(
            matches!(&result, Err(ImageViolation::TooMany { what, .. }) if *what == expected),
            "{expected}: {:?}",
            result.err()
        );
    }
}

#[test]
fn process_tree_is_checked() {
    let images = ImageSet::load();
    let is_tree_violation = |images: ImageSet| {
        let violation = images.violation();
        matches!(violation, ImageViolation::ProcessTree { .. })
    };
    for (entry, field, value) in [
        // The init of the namespace is not a process of the task.
        (0, 1, 1),
        (1, 1, 1),
        (1, 2, 1),
        (1, 3, 1),
        (1, 4, 1),
        (1, 4, 0),
        // A process occurs twice, has a missing parent, or is a second root.
        (1, 1, 2),
        (1, 2, 77),
        (1, 2, 0),
        (0, 2, 3),
        (0, 1, 1 << 22),
    ] {
        let images = images.clone().set("pstree.img", entry, &[], field, value);
        assert!(is_tree_violation(images), "{entry} {field} {value}");
    }
    let repeated_thread = images.clone().add("pstree.img", 1, &[], varint(5, 5));
    assert!(is_tree_violation(repeated_thread));
    let mut surplus_core = images.clone();
    surplus_core
        .0
        .insert("core-9.img".into(), images.0["core-5.img"].clone());
    assert!(is_tree_violation(surplus_core));
}

#[test]
fn namespaces_are_refused() {
    let images = ImageSet::load();
    for field in 5..=11 {
        for pid in [2, 3] {
            let name = format!("ids-{pid}.img");
            let images = images.clone().set(&name, 0, &[], field, 99);
            let violation = images.violation();
            assert!(
                matches!(violation, ImageViolation::Namespace { .. }),
                "{field}"
            );
        }
    }
    let images = images.set("ids-2.img", 0, &[], 12, 99);
    images
        .verify()
        .expect("CRIU gives each task a time namespace");
}

#[test]
fn unknown_images_and_fields_are_refused() {
    let images = ImageSet::load();
    for name in [
        "mountpoints-1.img",
        "creds-2.img",
        "cgroup.img",
        "core-99.bin",
        "x",
        "mm-9.img",
    ] {
        let mut images = images.clone();
        images.0.insert(name.into(), images.0["mm-2.img"].clone());
        let violation = images.violation();
        assert!(
            matches!(violation, ImageViolation::UnknownImage { .. }),
            "{name}: {violation}"
        );
    }
    let mut other_images = images.clone();
    other_images.0.insert("manifest".into(), Vec::new());
    let mut policy = test_policy();
    policy.other_files.insert("manifest".into());
    other_images
        .verify_with(&policy)
        .expect("the caller's own file");
    let dir = images.write();
    symlink("/etc/hostname", dir.path().join("dump.log")).expect("linked");
    let violation = verify_images(dir.path(), &test_policy()).expect_err("a link");
    assert!(
        matches!(violation, ImageViolation::UnknownImage { .. }),
        "{violation}"
    );
    for (name, path) in [
        ("inventory.img", &[][..]),
        ("pstree.img", &[]),
        ("core-2.img", &[]),
        ("core-2.img", &TASK),
        ("core-2.img", &CREDENTIALS),
        ("mm-2.img", &[]),
        ("mm-2.img", &[14]),
        ("files.img", &[3]),
        ("memfd.img", &[]),
        ("tty-info.img", &[]),
    ] {
        let images = images.clone().add(name, 0, path, varint(300, 1));
        let violation = images.violation();
        assert!(
            matches!(violation, ImageViolation::UnknownField { field: 300, .. }),
            "{name} {path:?}: {violation}"
        );
    }
}

/// Each image is required or optional; truncating an image is an error in either case.
#[test]
fn truncated_images_are_refused() {
    let images = ImageSet::load();
    for (name, image) in &images.0 {
        // The content of a deleted file has no length of its own.
        let content_bytes = if name.starts_with("ghost-file-") {
            5
        } else {
            1
        };
        for length in [image.len() - content_bytes, 9, 3, 0] {
            let mut images = images.clone();
            images.0.insert(name.clone(), image[..length].to_vec());
            assert!(images.verify().is_err(), "{name} of {length} bytes");
        }
    }
}

#[test]
fn regular_files_are_checked() {
    let images = ImageSet::load();
    let (entry, number) = images.path_file("/tmp/sempa-task/append.txt");
    let set = |field, value| {
        images
            .clone()
            .set("files.img", entry, &[number], field, value)
    };
    // O_CREAT, O_EXCL, O_TRUNC, O_NOATIME, and the invalid access mode 3.
    for flags in [0o100, 0o200, 0o1000, 0o1_000_000, 3] {
        let violation = set(2, flags).violation();
        assert!(
            matches!(violation, ImageViolation::FileFlags { .. }),
            "{flags:o}"
        );
    }
    assert!(
        matches!(set(9, 1).violation(), ImageViolation::FileKind { .. }),
        "external"
    );
    assert!(
        matches!(set(7, 2).violation(), ImageViolation::Namespace { .. }),
        "mount 1"
    );
    let block_device = u64::from(libc::S_IFBLK);
    assert!(matches!(
        set(10, block_device).violation(),
        ImageViolation::FileKind { .. }
    ));
    let rename = |path: &[u8]| {
        images
            .clone()
            .alter("files.img", entry, &[number], |fields| {
                fields.retain(|(number, _)| *number != 6);
                fields.push(bytes(6, path));
            })
    };
    for path in [
        "", "a", "a/b", "/a/../b", "/a/./b", "//a", "/a/", "/a\0b", "./a", "..",
    ] {
        let violation = rename(path.as_bytes()).violation();
        assert!(
            matches!(violation, ImageViolation::FilePath { .. }),
            "{path:?}: {violation}"
        );
    }
    for path in [
        "/proc/1/mem",
        "/proc/self/mem",
        "/proc/thread-self/fd",
        "/proc/20000",
    ] {
        let violation = rename(path.as_bytes()).violation();
        assert!(
            matches!(violation, ImageViolation::FileKind { .. }),
            "{path}: {violation}"
        );
    }
    let opened_files = rename(b"/etc/shadow")
        .verify()
        .expect("only root may open it");
    assert!(opened_files.files.contains(&OpenedFile {
        path: "/etc/shadow".into(),
        access: FileAccess::Write,
    }));
    let owned_by = |pid, uid| {
        images
            .clone()
            .alter("files.img", entry, &[number, 5], |owner| {
                *owner = [(1, uid), (2, uid), (3, 0), (4, 1), (5, pid)]
                    .map(|(number, value)| varint(number, value))
                    .to_vec();
            })
    };
    owned_by(0, 0).verify().expect("no owner");
    let _ = owned_by(2, u64::from(UID))
        .verify()
        .expect("the user's process");
    let (root_entry, root_number) = images.path_file("/");
    let other_root = images
        .clone()
        .alter("files.img", root_entry, &[root_number], |fields| {
            fields.retain(|(number, _)| *number != 6);
            fields.push(bytes(6, b"/tmp"));
        });
    assert!(matches!(
        other_root.violation(),
        ImageViolation::RootDirectory { .. }
    ));
}

#[test]
fn signals_of_files_go_to_the_user_only() {
    let images = ImageSet::load();
    for (kind, owner_field) in [(1, 5), (2, 4), (6, 3), (5, 9), (18, 4)] {
        let (entry, number) = images.file(kind, |_| true);
        for (pid, uid) in [(1, u64::from(UID)), (2, 0)] {
            let images =
                images
                    .clone()
                    .alter("files.img", entry, &[number, owner_field], |owner| {
                        *owner = [(1, uid), (2, uid), (3, 0), (4, 1), (5, pid)]
                            .map(|(number, value)| varint(number, value))
                            .to_vec();
                    });
            let violation = images.violation();
            assert!(
                matches!(violation, ImageViolation::FileKind { .. }),
                "{kind}: {violation}"
            );
        }
    }
}

#[test]
fn other_kinds_of_files_are_refused_by_name() {
    let images = ImageSet::load();
    for (kind, field, name) in [
        (10, 6, "packet socket"),
        (12, 14, "fanotify"),
        (13, 7, "netlink"),
        (14, 5, "namespace"),
        (15, 11, "tunnel"),
        (16, 15, "does not restore itself"),
        (19, 21, "BPF"),
        (99, 21, "kind 99"),
    ] {
        let (entry, number) = images.file(6, |_| true);
        let images = images.clone().alter("files.img", entry, &[], |fields| {
            fields.retain(|(other, _)| *other != 1 && *other != number);
            fields.extend([varint(1, kind), bytes(field, &encode(&[varint(1, 32)]))]);
        });
        let violation = images.violation();
        assert!(violation.to_string().contains(name), "{kind}: {violation}");
    }
    let (entry, _) = images.file(6, |_| true);
    let two_descriptions = images.clone().add("files.img", entry, &[], bytes(21, b""));
    assert!(matches!(
        two_descriptions.violation(),
        ImageViolation::Damaged { .. }
    ));
    let other_kind = images.set("fdinfo-2.img", 0, &[], 3, 2);
    assert!(matches!(
        other_kind.violation(),
        ImageViolation::Damaged { .. }
    ));
}

#[test]
fn special_files_are_checked() {
    let images = ImageSet::load();
    let altered = |kind: u64, field: u64, value: u64| {
        let (entry, number) = images.file(kind, |_| true);
        images
            .clone()
            .set("files.img", entry, &[number], field, value)
            .violation()
    };
    // The clocks 8 and 9 wake the machine.
    assert!(altered(17, 4, 8).to_string().contains("clock 8"));
    assert!(altered(20, 4, 1).to_string().contains("process 1"));
    let udp = |field, value| {
        let (entry, number) = images.file(4, |socket| socket.contains(&varint(5, 17)));
        images
            .clone()
            .set("files.img", entry, &[number], field, value)
            .violation()
    };
    assert!(udp(4, 3).to_string().contains("raw socket"));
    assert!(udp(3, 16).to_string().contains("family 16"));
    assert!(udp(5, 136).to_string().contains("protocol 136"));
    assert_eq!(udp(7, 1023), ImageViolation::PrivilegedPort { port: 1023 });
    let (tcp, number) = images.file(4, |socket| socket.contains(&varint(5, 6)));
    let connected = images.clone().set("files.img", tcp, &[number], 6, 1);
    assert!(connected.violation().to_string().contains("TCP connection"));
    for (field, text) in [(10, "SO_MARK"), (8, "SO_PRIORITY")] {
        for options_of in [(4, 14), (5, 10)] {
            let (entry, number) = images.file(options_of.0, |_| true);
            let path = [number, options_of.1];
            let images = images.clone().set("files.img", entry, &path, field, 7);
            assert!(images.violation().to_string().contains(text));
        }
    }
    for (field, value) in [(3, 3), (6, 1), (17, 2)] {
        assert!(
            matches!(
                altered(5, field, value),
                ImageViolation::FileKind { .. } | ImageViolation::Namespace { .. }
            ),
            "{field}"
        );
    }
    let path = b"/tmp/sempa-task/sock\0";
    let (entry, number) = images.file(5, |socket| socket.contains(&bytes(11, path)));
    let permissions = [number, 13];
    let set_user_id = images
        .clone()
        .set("files.img", entry, &permissions, 1, 0o144_755);
    assert!(matches!(
        set_user_id.violation(),
        ImageViolation::SpecialMode { .. }
    ));
    let of_root = images.clone().set("files.img", entry, &permissions, 2, 0);
    assert!(matches!(
        of_root.violation(),
        ImageViolation::ForeignOwner { uid: 0, .. }
    ));
    let relative = images
        .clone()
        .alter("files.img", entry, &[number], |fields| {
            fields.retain(|(number, _)| *number != 11);
            fields.push(bytes(11, b"../../etc/socket\0"));
        });
    assert!(matches!(
        relative.violation(),
        ImageViolation::FilePath { .. }
    ));
    let (entry, number) = images.file(8, |_| true);
    let watch_without_path = images
        .clone()
        .alter("files.img", entry, &[number, 5, 7], |handle| {
            handle.retain(|(number, _)| *number != 4);
        });
    assert!(
        watch_without_path
            .violation()
            .to_string()
            .contains("inotify")
    );
}

#[test]
fn owners_and_modes_of_created_files_are_checked() {
    let images = ImageSet::load();
    for (name, entry, uid_field, gid_field) in [
        ("ghost-file-1.img", 0, 1, 2),
        ("memfd.img", 0, 2, 3),
        ("memfd.img", 1, 2, 3),
    ] {
        for field in [uid_field, gid_field] {
            let violation = images.clone().set(name, entry, &[], field, 0).violation();
            assert!(
                matches!(violation, ImageViolation::ForeignOwner { .. }),
                "{name}"
            );
        }
    }
    for (name, field, mode) in [
        ("ghost-file-1.img", 3, 0o104_755),
        ("ghost-file-1.img", 3, 0o102_755),
        ("ghost-file-1.img", 3, 0o020_666),
        ("ghost-file-1.img", 3, 0o060_666),
        ("ghost-file-1.img", 3, 0o120_777),
        ("memfd.img", 9, 0o104_777),
    ] {
        let violation = images.clone().set(name, 0, &[], field, mode).violation();
        assert!(
            matches!(violation, ImageViolation::SpecialMode { .. }),
            "{name} {mode:o}"
        );
    }
    for (field, value) in [(6, 0x40), (8, 4)] {
        let violation = images
            .clone()
            .set("memfd.img", 1, &[], field, value)
            .violation();
        assert!(
            matches!(violation, ImageViolation::FileKind { .. }),
            "{field}"
        );
    }
    for (remap_field, value) in [(3, 0), (3, 2)] {
        let violation = images
            .clone()
            .set("remap-fpath.img", 0, &[], remap_field, value);
        assert!(matches!(
            violation.violation(),
            ImageViolation::FileKind { .. }
        ));
    }
    let unknown_ghost = images.clone().set("remap-fpath.img", 0, &[], 2, 7);
    assert!(unknown_ghost.verify().is_err());
    // The entries of the terminal: the master end, which is /dev/ptmx, and the slave end.
    for (entry, field, value) in [
        (0, 14, u64::from(UID)),
        (1, 14, 0),
        (1, 15, 0),
        (0, 15, 100),
    ] {
        let violation = images
            .clone()
            .set("tty-info.img", entry, &[], field, value)
            .violation();
        assert!(
            matches!(violation, ImageViolation::ForeignOwner { .. }),
            "{entry} {field} {value}: {violation}"
        );
    }
    for (field, value) in [(2, 3), (6, 1), (7, 1)] {
        let violation = images
            .clone()
            .set("tty-info.img", 0, &[], field, value)
            .violation();
        assert!(
            matches!(violation, ImageViolation::FileKind { .. }),
            "{field}: {violation}"
        );
    }
}

#[test]
fn memory_is_checked() {
    let images = ImageSet::load();
    let mapping = |field, value| {
        images
            .clone()
            .set("mm-2.img", 0, &[14], field, value)
            .violation()
    };
    for (field, value) in [
        // The addresses are not aligned, descend, or belong to the kernel.
        (1, 4_194_305),
        (1, 4_321_280),
        (2, 1 << 47 | 0x1000),
        // Mappings of System V memory, packet sockets, uprobes and plugins.
        (7, 1 << 10),
        (7, 1 << 11),
        (7, 1 << 17),
        (7, 1 << 27),
        // An unknown flag, an unknown permission.
        (6, 0x2 | 0x200_0000),
        (5, 0x8),
        // The file would be opened with O_TRUNC.
        (10, 0o1002),
    ] {
        let violation = mapping(field, value);
        assert!(
            matches!(violation, ImageViolation::Memory { pid: 2, .. }),
            "{field} {value:#x}: {violation}"
        );
    }
    assert!(
        matches!(mapping(4, 9999), ImageViolation::Damaged { .. }),
        "no such file"
    );
    let outside_page = images.clone().set("pagemap-2.img", 1, &[], 1, 0x1000);
    assert!(matches!(
        outside_page.violation(),
        ImageViolation::Memory { pid: 2, .. }
    ));
    let parent_page = images.clone().set("pagemap-2.img", 1, &[], 4, 1);
    assert!(matches!(
        parent_page.violation(),
        ImageViolation::Damaged { .. }
    ));
    let no_program = images.set("mm-2.img", 0, &[], 12, 9999);
    assert!(matches!(
        no_program.violation(),
        ImageViolation::Damaged { .. }
    ));
}

#[test]
fn denied_file_becomes_a_refusal() {
    let opened_files = ImageSet::load().verify().expect("harmless");
    check_access(&opened_files, |_: &OpenedFile| Ok(())).expect("all are permitted");
    let violation = check_access(&opened_files, |file: &OpenedFile| {
        match file.access == FileAccess::Create {
            true => Err(std::io::Error::other("no")),
            false => Ok(()),
        }
    });
    let violation = violation.expect_err("one is denied");
    assert!(matches!(&violation, ImageViolation::Access { why, .. } if why == "no"));
    let failure = sempa_proto::migration::Failure::from(violation);
    assert!(failure.to_string().contains("ghost.txt: no"), "{failure}");
    let failure = sempa_proto::migration::Failure::from(ImageViolation::Capabilities {
        pid: 2,
        set: "effective",
    });
    assert_eq!(
        failure.to_string(),
        "refused: its images are not restored: process 2 would have capabilities (effective)"
    );
}

/// The kernel decides, with the ids of the user, which files may be opened.
#[test]
#[ignore = "system tier: needs root to become another user"]
fn user_may_open_only_own_files() {
    let dir = tempfile::Builder::new()
        .permissions(fs::Permissions::from_mode(0o755))
        .tempdir()
        .expect("a directory");
    let create = |name: &str, uid: u32, mode: u32| {
        let path = dir.path().join(name);
        fs::write(&path, "content").expect("written");
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("set");
        std::os::unix::fs::chown(&path, Some(uid), Some(0)).expect("root");
        path
    };
    let own_file = create("own", UID, 0o600);
    let secret_file = create("secret", 0, 0o600);
    let shared_file = create("shared", 0, 0o644);
    let own_dir = dir.path().join("own-directory");
    fs::create_dir(&own_dir).expect("made");
    std::os::unix::fs::chown(&own_dir, Some(UID), None).expect("root");
    let link = own_dir.join("link");
    symlink("/proc/self/mem", &link).expect("linked");
    let descriptor_link = own_dir.join("descriptor");
    symlink("/dev/fd/0", &descriptor_link).expect("linked");
    let check = |path: &Path, access: FileAccess| {
        let file = OpenedFile {
            path: path.to_path_buf(),
            access,
        };
        let files = OpenedFiles {
            files: BTreeSet::from([file]),
        };
        let result = check_access_as_user(&files, &test_policy().identity, None);
        assert!(
            matches!(result, Ok(()) | Err(ImageViolation::Access { .. })),
            "{result:?}"
        );
        result.is_ok()
    };
    for (path, access, expected) in [
        (&*own_file, FileAccess::ReadWrite, true),
        (&own_file, FileAccess::Execute, false),
        (&shared_file, FileAccess::Read, true),
        (&shared_file, FileAccess::ReadWrite, false),
        (&secret_file, FileAccess::Read, false),
        (&secret_file, FileAccess::Path, true),
        (&own_dir, FileAccess::Enter, true),
        (&own_dir.join("new"), FileAccess::Create, true),
        (&dir.path().join("new"), FileAccess::Create, false),
        (&own_dir.join("missing"), FileAccess::Read, false),
        (&own_file, FileAccess::Enter, false),
        (&link, FileAccess::Read, false),
        (&descriptor_link, FileAccess::Read, false),
        (Path::new("/dev/null"), FileAccess::ReadWrite, true),
        (Path::new("/dev/fuse"), FileAccess::ReadWrite, false),
        (Path::new("/etc/shadow"), FileAccess::Read, false),
        (Path::new("/"), FileAccess::Enter, true),
        (Path::new("/bin/sh"), FileAccess::Execute, true),
    ] {
        assert_eq!(
            check(path, access),
            expected,
            "{} {access:?}",
            path.display()
        );
    }
    // The ids of the thread that checks do not remain.
    assert_eq!(nix::unistd::geteuid().as_raw(), 0);
    fs::read(&secret_file).expect("still root");
}
