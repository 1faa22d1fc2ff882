//! Tests with the images of a real task: CRIU 4.2.1 dumped a Python program of the user 65534 in
//! a PID and a mount namespace of its own. `testdata/user-images/README.md` describes the task. The
//! content of memory is left out, because it is not checked.

mod files;
mod image_set;

use super::*;
use image_set::*;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};

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
