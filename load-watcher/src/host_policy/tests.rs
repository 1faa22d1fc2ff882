use super::*;
use crate::owner_override::{Drain, OwnerOverride};
use nix::poll::{PollFd, PollFlags, poll};
use sempa_proto::Micros;
use std::fs;
use std::os::unix::fs::PermissionsExt;

const ALICE_UID: u32 = 21_001;
const OLGA_UID: u32 = 21_002;

/// Reads the policy of a host for a virtual machine whose user is Alice, an ordinary user.
/// `user_defaults` is the text of Alice's default settings.
fn read_policy(dir: &Path, user_defaults: &str) -> HostPolicy {
    let paths = PolicyPaths {
        user: dir.join("own").into(),
        admin: dir.join("admin"),
        overrides: dir.join("words"),
    };
    let user_defaults = Policy::parse("wishes", user_defaults).expect("good");
    HostPolicy::read_and_merge(
        paths,
        VmUser {
            uid: ALICE_UID,
            name: "alice".into(),
            defaults: user_defaults,
        },
    )
}

fn write_file(dir: &Path, name: &str, text: &str) {
    fs::write(dir.join(name), text).expect("the test's own file");
}

fn cores_override(cores: u32, uid: u32, user: &str) -> UserOverride {
    let declared_override = OwnerOverride {
        policy: Policy {
            cores: Some(cores),
            ..Policy::default()
        },
        ..OwnerOverride::default()
    };
    UserOverride {
        uid,
        user: user.into(),
        owner_override: declared_override,
    }
}

fn login(user: &str, terminal: &str, origin: &str) -> Login {
    Login {
        user_name: user.into(),
        terminal: terminal.into(),
        origin: origin.into(),
        at: Micros(1),
    }
}

fn cores_and_origin(host_policy: &HostPolicy) -> (Option<u32>, String) {
    let setting = host_policy
        .merged_policy()
        .settings
        .iter()
        .find(|(name, ..)| *name == "cores");
    (
        host_policy.merged_policy().policy.cores,
        setting
            .map(|(.., origin)| origin.clone())
            .unwrap_or_default(),
    )
}

/// The sources have these priorities, highest first: the override of an owner, the owner's
/// published policy, the administrator's file, the user's file, the user's defaults.
#[test]
fn policy_sources_are_merged_by_priority() {
    let dir = tempfile::tempdir().expect("a folder");
    write_file(dir.path(), "admin", "cores = 3\nnice = 5\n");
    write_file(
        dir.path(),
        "own",
        "cores = 8\nnice = 0\nmemory_free = \"1G\"\n",
    );
    let mut host_policy = read_policy(
        dir.path(),
        "cores = 9\nmemory_free = \"1K\"\nleave_after = 7",
    );
    assert_eq!(
        cores_and_origin(&host_policy),
        (Some(3), dir.path().join("admin").display().to_string())
    );
    host_policy.published_policies.insert(
        OLGA_UID,
        Policy::parse_without_owners("x", "cores = 2\nthen = \"kill\"").expect("good"),
    );
    host_policy.merge_sources();
    let policy_path = published_policy::policy_file(&dir.path().join("words"), OLGA_UID);
    assert_eq!(
        cores_and_origin(&host_policy),
        (Some(2), policy_path.display().to_string())
    );
    host_policy.overrides = vec![cores_override(1, OLGA_UID, "olga")];
    host_policy.merge_sources();
    assert_eq!(
        cores_and_origin(&host_policy),
        (Some(1), "pvm owner".into())
    );
    let settings: Vec<_> = host_policy
        .merged_policy()
        .settings
        .iter()
        .map(|(name, value, _)| format!("{name}={value}"))
        .collect();
    assert_eq!(
        settings,
        [
            "cores=1",
            "then=\"kill\"",
            "nice=5",
            "memory_free=\"1G\"",
            "leave_after=7"
        ]
    );
}

/// The override and the file of the user of the virtual machine have priority over the
/// administrator's file only if the user is an owner.
#[test]
fn vm_user_counts_before_admin_only_as_owner() {
    let dir = tempfile::tempdir().expect("a folder");
    write_file(dir.path(), "admin", "cores = 3\n");
    write_file(dir.path(), "own", "cores = 8\n");
    let mut host_policy = read_policy(dir.path(), "");
    host_policy.overrides = vec![cores_override(7, ALICE_UID, "alice")];
    host_policy.published_policies.insert(
        ALICE_UID,
        Policy::parse_without_owners("x", "cores = 6").expect("good"),
    );
    host_policy.merge_sources();
    assert_eq!(cores_and_origin(&host_policy).0, Some(3));
    // The administrator names no owners. At first Alice is logged in only over the network, then
    // also at the machine itself.
    host_policy.update_logins(&[
        login("alice", "pts/0", "h9"),
        login("alice", "pts/1", ":pts/0:S.0"),
    ]);
    assert_eq!(cores_and_origin(&host_policy).0, Some(3));
    host_policy.update_logins(&[login("alice", "tty2", "")]);
    assert_eq!(
        cores_and_origin(&host_policy),
        (Some(7), "pvm owner".into())
    );
    host_policy.update_logins(&[]);
    assert_eq!(
        cores_and_origin(&host_policy).0,
        Some(7),
        "she was the last one there"
    );
    host_policy.update_logins(&[login("olga", ":0", ":0")]);
    assert_eq!(
        cores_and_origin(&host_policy).0,
        Some(3),
        "it is somebody else's now"
    );
    write_file(dir.path(), "admin", "cores = 3\nowners = [\"olga\"]\n");
    assert_eq!(host_policy.read_admin_policy(), None);
    host_policy.update_logins(&[login("alice", "tty2", "")]);
    assert_eq!(
        cores_and_origin(&host_policy).0,
        Some(3),
        "the administrator has named others"
    );
    write_file(
        dir.path(),
        "admin",
        "cores = 3\nowners = [\"olga\", \"alice\"]\n",
    );
    assert_eq!(host_policy.read_admin_policy(), None);
    assert_eq!(cores_and_origin(&host_policy).0, Some(7));
}

/// The administrator, or all owners who have stated anything, end the protection of owners. The
/// user of the virtual machine does not.
#[test]
fn only_the_owners_side_switches_the_watch_off() {
    let dir = tempfile::tempdir().expect("a folder");
    let policy = |text: &str| Policy::parse_without_owners("x", text).expect("good");
    write_file(dir.path(), "own", "watch = false\n");
    let mut host_policy = read_policy(dir.path(), "watch = false");
    host_policy
        .published_policies
        .insert(ALICE_UID, policy("watch = false"));
    host_policy.merge_sources();
    assert_eq!(host_policy.switched_off_by(), None, "she is not an owner");
    assert_eq!(host_policy.merged_policy().policy.watch, None);
    host_policy
        .published_policies
        .insert(0, policy("watch = false"));
    host_policy.merge_sources();
    assert!(host_policy.switched_off_by().is_some());
    // Another owner wants to be protected.
    host_policy.overrides = vec![cores_override(7, 0, "root")];
    host_policy
        .published_policies
        .insert(OLGA_UID, policy("cores = 1"));
    host_policy.merge_sources();
    assert_eq!(host_policy.switched_off_by(), None);
    host_policy
        .published_policies
        .insert(OLGA_UID, policy("watch = false"));
    host_policy.merge_sources();
    assert!(host_policy.switched_off_by().is_some());
    host_policy.published_policies.clear();
    host_policy.merge_sources();
    assert_eq!(host_policy.switched_off_by(), None);
    write_file(dir.path(), "admin", "watch = false\n");
    assert_eq!(host_policy.read_admin_policy(), None);
    let source = host_policy.switched_off_by().expect("the administrator");
    assert!(source.ends_with("/admin"), "{source}");
}

/// Only root drains a machine. A drain is in force although the administrator has switched off the
/// protection of owners.
#[test]
fn only_root_drains_a_machine() {
    let dir = tempfile::tempdir().expect("a folder");
    write_file(dir.path(), "admin", "watch = false\n");
    let mut host_policy = read_policy(dir.path(), "");
    let drained_by = |uid| {
        let mut user_override = cores_override(7, uid, "someone");
        user_override.owner_override.drain = Some(Drain::default());
        vec![user_override]
    };
    host_policy.overrides = drained_by(ALICE_UID);
    host_policy.merge_sources();
    assert_eq!(host_policy.drain(), None);
    assert!(host_policy.switched_off_by().is_some());
    host_policy.overrides = drained_by(0);
    host_policy.merge_sources();
    assert_eq!(host_policy.drain(), Some(&Drain::default()));
    assert_eq!(host_policy.switched_off_by(), None);
}

/// Root is an owner of every machine.
#[test]
fn root_is_always_an_owner() {
    let dir = tempfile::tempdir().expect("a folder");
    write_file(dir.path(), "admin", "cores = 3\nowners = [\"olga\"]\n");
    write_file(dir.path(), "own", "cores = 8\n");
    let paths = PolicyPaths {
        user: dir.path().join("own").into(),
        admin: dir.path().join("admin"),
        overrides: dir.path().join("w"),
    };
    let host_policy = HostPolicy::read_and_merge(
        paths,
        VmUser {
            uid: 0,
            name: "root".into(),
            defaults: Policy::default(),
        },
    );
    assert_eq!(cores_and_origin(&host_policy).0, Some(8));
}

/// A malformed file is refused, and its previous content stays in force until it is corrected or
/// removed.
#[test]
fn malformed_file_keeps_previous_policy() {
    let dir = tempfile::tempdir().expect("a folder");
    let write_own_file = |text: &str| write_file(dir.path(), "own", text);
    write_own_file("cores = 2\n");
    let mut host_policy = read_policy(dir.path(), "");
    write_own_file("cores = 3\nnever = 5\n");
    let error = host_policy.read_user_policy().expect("wrong");
    assert!(
        error.contains("own, line 2: ") && error.ends_with("the previous content stays in force"),
        "{error}"
    );
    assert_eq!(
        (
            host_policy.merged_policy().policy.cores,
            host_policy.errors()
        ),
        (Some(2), vec![error])
    );
    write_own_file("cores = 4\n");
    assert_eq!(host_policy.read_user_policy(), None);
    assert_eq!(
        (
            host_policy.merged_policy().policy.cores,
            host_policy.errors().len()
        ),
        (Some(4), 0)
    );
    write_own_file("owners = [\"me\"]\n");
    assert!(
        host_policy
            .read_user_policy()
            .expect("not his to say")
            .contains("administrator")
    );
    fs::remove_file(dir.path().join("own")).expect("the test's own file");
    assert_eq!(host_policy.read_user_policy(), None);
    assert_eq!(host_policy.merged_policy().policy.cores, None);
}

/// A malformed published policy is refused, and the previous one stays in force until it is
/// withdrawn.
#[test]
fn malformed_published_policy_keeps_previous_one() {
    let dir = tempfile::tempdir().expect("a folder");
    let overrides_dir = dir.path().join("words");
    fs::create_dir(&overrides_dir).expect("the test's own folder");
    let mut host_policy = read_policy(dir.path(), "");
    let uid = Uid::effective().as_raw();
    let publish = |text: Option<&str>| {
        published_policy::write(&overrides_dir, uid, text).expect("the test's own folder")
    };
    publish(Some("leave_after = 30\n"));
    assert_eq!(host_policy.read_overrides(), Vec::<String>::new());
    let nice_level = |host_policy: &HostPolicy| host_policy.merged_policy().policy.nice;
    publish(Some("nice = 4\n"));
    assert_eq!(
        (host_policy.read_overrides(), nice_level(&host_policy)),
        (Vec::new(), Some(4))
    );
    publish(Some("nice = 5\n\nnice = 6\n"));
    let errors = host_policy.read_overrides();
    assert!(
        errors.len() == 1 && errors[0].contains(".policy.toml, line 3: duplicate key"),
        "{errors:?}"
    );
    assert_eq!(
        (host_policy.errors(), nice_level(&host_policy)),
        (errors, Some(4))
    );
    publish(None);
    assert_eq!(
        (
            host_policy.read_overrides(),
            nice_level(&host_policy),
            host_policy.errors()
        ),
        (Vec::new(), None, Vec::new())
    );
}

/// End of the report about a malformed file that was never valid before.
const CLOSED_HOST_SUFFIX: &str = "; until it is corrected no guest is welcome here";

/// If the file "admin" or "own" is malformed and was never valid before, it closes the host to
/// guests until the file is corrected or removed.
#[test]
fn file_never_valid_closes_host_until_fixed() {
    let dir = tempfile::tempdir().expect("a folder");
    for file_name in ["admin", "own"] {
        let read_file = |host_policy: &mut HostPolicy| {
            if file_name == "admin" {
                host_policy.read_admin_policy()
            } else {
                host_policy.read_user_policy()
            }
        };
        write_file(dir.path(), file_name, "never = [\"always\"]\ncorse = 2\n");
        let mut host_policy = read_policy(dir.path(), "");
        let reason = host_policy
            .policy_unknown()
            .expect("nobody knows what it forbids")
            .to_string();
        assert!(
            reason.contains(&format!("{file_name}, line 2: unknown field `corse`"))
                && reason.ends_with(CLOSED_HOST_SUFFIX),
            "{reason}"
        );
        assert_eq!(host_policy.errors(), std::slice::from_ref(&reason));
        assert_eq!(
            (read_file(&mut host_policy), host_policy.policy_unknown()),
            (Some(reason.clone()), Some(reason.as_str())),
            "it is still wrong"
        );
        write_file(dir.path(), file_name, "cores = 2\n");
        assert_eq!(
            (read_file(&mut host_policy), host_policy.policy_unknown()),
            (None, None)
        );
        // In the following cases the file has valid content before each error.
        write_file(dir.path(), file_name, "corse = 3\n");
        assert!(
            read_file(&mut host_policy)
                .is_some_and(|message| message.ends_with("the previous content stays in force"))
        );
        assert_eq!(
            (
                host_policy.policy_unknown(),
                host_policy.merged_policy().policy.cores
            ),
            (None, Some(2))
        );
        fs::remove_file(dir.path().join(file_name)).expect("the test's own file");
        assert_eq!(read_file(&mut host_policy), None);
        write_file(dir.path(), file_name, "corse = 3\n");
        assert!(
            read_file(&mut host_policy)
                .is_some_and(|message| message.ends_with(CLOSED_HOST_SUFFIX)),
            "what it said was taken back"
        );
        assert!(host_policy.policy_unknown().is_some());
        fs::remove_file(dir.path().join(file_name)).expect("the test's own file");
        assert_eq!(
            (read_file(&mut host_policy), host_policy.policy_unknown()),
            (None, None)
        );
    }
}

#[test]
fn unreadable_file_closes_host() {
    let dir = tempfile::tempdir().expect("a folder");
    fs::create_dir(dir.path().join("admin")).expect("the test's own folder");
    let reason = read_policy(dir.path(), "")
        .policy_unknown()
        .expect("nobody knows what it forbids")
        .to_string();
    assert!(
        reason.contains("admin cannot be read: ") && reason.ends_with(CLOSED_HOST_SUFFIX),
        "{reason}"
    );
}

/// If a published policy is malformed and was never valid before, it closes the host to guests
/// until the policy is corrected or withdrawn.
#[test]
fn published_policy_never_valid_closes_host() {
    let dir = tempfile::tempdir().expect("a folder");
    let overrides_dir = dir.path().join("words");
    fs::create_dir(&overrides_dir).expect("the test's own folder");
    let uid = Uid::effective().as_raw();
    let publish = |text: Option<&str>| {
        published_policy::write(&overrides_dir, uid, text).expect("the test's own folder")
    };
    publish(Some("nice = 5\nnice = 6\n"));
    let mut host_policy = read_policy(dir.path(), "");
    let reason = host_policy
        .policy_unknown()
        .expect("nobody knows what it forbids")
        .to_string();
    assert!(
        reason.contains(".policy.toml, line 2: duplicate key")
            && reason.ends_with(CLOSED_HOST_SUFFIX),
        "{reason}"
    );
    assert_eq!(
        (host_policy.errors(), host_policy.read_overrides()),
        (vec![reason.clone()], vec![reason.clone()])
    );
    assert_eq!(
        host_policy.policy_unknown(),
        Some(reason.as_str()),
        "it is still wrong"
    );
    publish(Some("nice = 5\n"));
    assert_eq!(
        (host_policy.read_overrides(), host_policy.policy_unknown()),
        (Vec::new(), None)
    );
    publish(Some("nice = 5\nnice = 6\n"));
    assert!(host_policy.read_overrides()[0].ends_with("the previous content stays in force"));
    assert_eq!(
        (
            host_policy.policy_unknown(),
            host_policy.merged_policy().policy.nice
        ),
        (None, Some(5))
    );
    publish(None);
    assert_eq!(
        (host_policy.read_overrides(), host_policy.policy_unknown()),
        (Vec::new(), None)
    );
}

/// A malformed published policy of a user other than the user of the virtual machine closes the
/// host to guests only if this user is an owner.
#[test]
fn malformed_policy_of_non_owner_is_ignored() {
    let dir = tempfile::tempdir().expect("a folder");
    write_file(dir.path(), "admin", "owners = [\"olga\"]\n");
    let mut host_policy = read_policy(dir.path(), "");
    host_policy
        .invalid_published
        .insert(OLGA_UID + 1, "wrong".into());
    host_policy.merge_sources();
    assert_eq!(host_policy.policy_unknown(), None);
    write_file(dir.path(), "admin", "nice = 1\n");
    assert_eq!(
        (
            host_policy.read_admin_policy(),
            host_policy.policy_unknown()
        ),
        (None, Some("wrong")),
        "anybody is an owner now"
    );
}

#[test]
fn blocked_users_are_given_by_name_or_uid() {
    let dir = tempfile::tempdir().expect("a folder");
    let host_policy = read_policy(
        dir.path(),
        "[blocked]\nusers = [\"root\", \"12345\", 12346]",
    );
    assert_eq!(
        (host_policy.blocked_uids(), host_policy.errors()),
        (&[0, 12345, 12346][..], Vec::new())
    );
}

/// Returns the expected report about a blocked user without an account on this host.
fn unknown_user_report(dir: &Path, file_and_line: &str, name: &str) -> String {
    let place = dir.join(file_and_line);
    let place = place.display();
    format!(
        "{place}: blocked user {name:?}: no account of this host has this name; the entry has no effect"
    )
}

/// A blocked user without an account on this host is reported with file and line; the rest of the
/// file is in force.
#[test]
fn unknown_blocked_user_is_reported_with_line() {
    let dir = tempfile::tempdir().expect("a folder");
    let block_users = |names: &str| {
        write_file(
            dir.path(),
            "admin",
            &format!("nice = 3\n[blocked]\nusers = [{names}]\n"),
        )
    };
    block_users("\"root\",\n\"nobody-has-this-name\",\n99999999999,\n12345");
    let mut host_policy = read_policy(dir.path(), "");
    assert_eq!(
        (
            host_policy.blocked_uids(),
            host_policy.merged_policy().policy.nice,
            host_policy.policy_unknown()
        ),
        (&[0, 12345][..], Some(3), None)
    );
    let expected_errors = [
        ("admin, line 4", "nobody-has-this-name"),
        ("admin, line 5", "99999999999"),
    ];
    assert_eq!(
        host_policy.errors(),
        expected_errors.map(|(line, name)| unknown_user_report(dir.path(), line, name))
    );
    // The file itself is valid, so the next read accepts the file without an error.
    assert_eq!(
        (host_policy.read_admin_policy(), host_policy.blocked_uids()),
        (None, &[0, 12345][..])
    );
    block_users("\"root\"");
    assert_eq!(
        (
            host_policy.read_admin_policy(),
            host_policy.blocked_uids(),
            host_policy.errors()
        ),
        (None, &[0][..], Vec::new())
    );
}

/// Blocked users without an account are reported only if the list that names them is in force.
#[test]
fn only_effective_unknown_users_are_reported() {
    let dir = tempfile::tempdir().expect("a folder");
    write_file(
        dir.path(),
        "own",
        "[blocked]\nusers = [\"nobody-has-this-name\"]\n",
    );
    write_file(dir.path(), "admin", "[blocked]\nusers = []\n");
    let mut host_policy = read_policy(dir.path(), "");
    assert_eq!(
        host_policy.errors(),
        Vec::<String>::new(),
        "the administrator's list counts"
    );
    host_policy.update_logins(&[login("alice", "tty2", "")]);
    assert_eq!(
        host_policy.errors(),
        [unknown_user_report(
            dir.path(),
            "own, line 2",
            "nobody-has-this-name"
        )],
        "she is the owner now"
    );
}

/// The number of reports about blocked users without an account is limited, and so is the length of
/// the names in the reports.
#[test]
fn unknown_user_reports_are_limited() {
    let dir = tempfile::tempdir().expect("a folder");
    let long_name = "x".repeat(UNKNOWN_NAME_BYTES_MAX + 1);
    let names: Vec<String> = (0..100).map(|n| format!("\"{long_name}{n}\"")).collect();
    write_file(
        dir.path(),
        "own",
        &format!("[blocked]\nusers = [\"root\", {}, 12345]", names.join(", ")),
    );
    let host_policy = read_policy(dir.path(), "");
    assert_eq!(
        (host_policy.blocked_uids(), host_policy.errors().len()),
        (&[0, 12345][..], UNKNOWN_USERS_MAX)
    );
    assert_eq!(
        host_policy.errors()[0],
        unknown_user_report(dir.path(), "own, line 2", &long_name[1..])
    );
}

/// Overrides and published policies of users who are not named as owners are ignored.
#[test]
fn only_named_owners_count() {
    let dir = tempfile::tempdir().expect("a folder");
    write_file(dir.path(), "admin", "owners = [\"olga\", \"21009\"]\n");
    let mut host_policy = read_policy(dir.path(), "");
    host_policy.overrides = vec![cores_override(1, OLGA_UID + 1, "mallory")];
    host_policy.published_policies.insert(
        OLGA_UID + 1,
        Policy::parse_without_owners("x", "nice = 1").expect("good"),
    );
    host_policy.merge_sources();
    assert_eq!(
        (
            host_policy.merged_policy().policy.cores,
            host_policy.merged_policy().policy.nice
        ),
        (None, None)
    );
    // An owner without an account on this host is named by uid.
    host_policy.overrides = vec![cores_override(1, 21_009, "21009")];
    host_policy.published_policies.insert(
        21_009,
        Policy::parse_without_owners("x", "nice = 2").expect("good"),
    );
    host_policy.merge_sources();
    assert_eq!(
        (
            host_policy.merged_policy().policy.cores,
            host_policy.merged_policy().policy.nice
        ),
        (Some(1), Some(2))
    );
}

/// Root may name any path for the administrator's file. All other users may name only a path that
/// belongs to root and that no other user can change.
#[test]
fn admin_path_must_belong_to_root() {
    let dir = tempfile::tempdir().expect("a folder");
    write_file(dir.path(), "admin", "");
    let (non_root_path, default_path) = (dir.path().join("admin"), Path::new(ADMIN_FILE));
    assert_eq!(
        trusted_path(non_root_path.clone(), default_path, Uid::from_raw(0)),
        (non_root_path.clone(), None)
    );
    // Paths that belong to root and that no other user can change are accepted from all users.
    for root_path in [
        Path::new("/etc/passwd"),
        Path::new("/var/tmp"),
        default_path,
    ] {
        assert_eq!(
            trusted_path(
                root_path.to_path_buf(),
                default_path,
                Uid::from_raw(ALICE_UID)
            ),
            (root_path.to_path_buf(), None)
        );
    }
    fs::set_permissions(&non_root_path, PermissionsExt::from_mode(0o666))
        .expect("the test's own file");
    for refused_path in [
        non_root_path,
        PathBuf::from("/dev/null"),
        dir.path().join("none"),
    ] {
        let (returned_path, warning) =
            trusted_path(refused_path.clone(), default_path, Uid::from_raw(ALICE_UID));
        assert!(
            returned_path == default_path
                && warning.is_some_and(|message| message.contains("does not belong to root")),
            "{}",
            refused_path.display()
        );
    }
}

/// Files under many uids without an account, as any user with subordinate uids can make them, do
/// not displace the file of a user with an account and a higher uid. The omitted users are
/// reported.
#[test]
#[ignore = "system tier: needs root"]
fn uids_without_account_do_not_silence_owners() {
    assert!(Uid::effective().is_root(), "cannot run here: needs root");
    let dir = tempfile::tempdir().expect("a folder");
    let overrides_dir = dir.path().join("words");
    fs::create_dir(&overrides_dir).expect("the test's own folder");
    let nobody = User::from_name("nobody").expect("readable accounts");
    let nobody_uid = nobody.expect("it exists on every machine").uid.as_raw();
    let foreign_uids = nobody_uid - 2 * FILE_USERS_MAX as u32..nobody_uid;
    for uid in foreign_uids.chain([nobody_uid]) {
        let path = owner_override::override_file(&overrides_dir, uid);
        fs::write(&path, "cores = 2\n").expect("the test's own folder");
        std::os::unix::fs::chown(&path, Some(uid), None).expect("root may");
    }
    let mut host_policy = read_policy(dir.path(), "");
    let is_read =
        |host_policy: &HostPolicy| host_policy.read_files().iter().any(|f| f.uid == nobody_uid);
    while !is_read(&host_policy) {
        let fd = host_policy.file_users_fd().expect("a descriptor");
        let mut fds = [PollFd::new(fd, PollFlags::POLLIN)];
        assert_eq!(poll(&mut fds, 20_000_u16), Ok(1), "the owner is silenced");
        assert!(host_policy.take_file_users_event());
        host_policy.read_overrides();
    }
    assert_eq!(host_policy.read_files().len(), FILE_USERS_MAX);
    let is_reported = |line: &String| line.starts_with("more than 256 users have files");
    assert!(host_policy.errors().iter().any(is_reported));
}
