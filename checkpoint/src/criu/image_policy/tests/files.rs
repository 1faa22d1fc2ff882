//! Tests of the checks of open files.

use super::image_set::*;
use crate::criu::image_policy::{FileAccess, ImageViolation, OpenedFile};

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
