use super::*;
use crate::owner_override::OwnerOverride;
use sempa_proto::Micros;
use std::fs;
use std::os::unix::fs::PermissionsExt;

const ALICE: u32 = 21_001;
const OLGA: u32 = 21_002;

/// Reads the policy of a host for a virtual machine whose user is Alice, an ordinary user. `wishes`
/// contains Alice's defaults.
fn read_policy(dir: &Path, wishes: &str) -> HostPolicy {
    let places = PolicyPaths {
        user: dir.join("own"),
        admin: dir.join("admin"),
        overrides: dir.join("words"),
    };
    let wishes = Policy::parse("wishes", wishes).expect("good");
    HostPolicy::read(
        places,
        VmUser {
            uid: ALICE,
            name: "alice".into(),
            defaults: wishes,
        },
    )
}

fn put(dir: &Path, name: &str, text: &str) {
    fs::write(dir.join(name), text).expect("the test's own file");
}

fn cores_override(cores: u32, uid: u32, user: &str) -> UserOverride {
    let word = OwnerOverride {
        policy: Policy {
            cores: Some(cores),
            ..Policy::default()
        },
        ..OwnerOverride::default()
    };
    UserOverride {
        uid,
        user: user.into(),
        owner_override: word,
    }
}

fn login(user: &str, line: &str, from: &str) -> Login {
    Login {
        user: user.into(),
        line: line.into(),
        from: from.into(),
        at: Micros(1),
    }
}

fn cores(rules: &HostPolicy) -> (Option<u32>, String) {
    let setting = rules
        .merged()
        .settings
        .iter()
        .find(|(name, ..)| *name == "cores");
    (
        rules.merged().policy.cores,
        setting.map(|(.., from)| from.clone()).unwrap_or_default(),
    )
}

/// An owner's override has priority over the owner's published policy, which has priority over the
/// administrator's file, which has priority over the user's file and defaults.
#[test]
fn policy_sources_are_merged_by_priority() {
    let dir = tempfile::tempdir().expect("a folder");
    put(dir.path(), "admin", "cores = 3\nnice = 5\n");
    put(
        dir.path(),
        "own",
        "cores = 8\nnice = 0\nmemory_free = \"1G\"\n",
    );
    let mut rules = read_policy(
        dir.path(),
        "cores = 9\nmemory_free = \"1K\"\nleave_after = 7",
    );
    assert_eq!(
        cores(&rules),
        (Some(3), dir.path().join("admin").display().to_string())
    );
    rules.published_policies.insert(
        OLGA,
        Policy::parse_own("x", "cores = 2\nthen = \"kill\"").expect("good"),
    );
    rules.merge();
    let file = published_policy::policy_file(&dir.path().join("words"), OLGA);
    assert_eq!(cores(&rules), (Some(2), file.display().to_string()));
    rules.overrides = vec![cores_override(1, OLGA, "olga")];
    rules.merge();
    assert_eq!(cores(&rules), (Some(1), "pvm owner".into()));
    let said: Vec<_> = rules
        .merged()
        .settings
        .iter()
        .map(|(name, value, _)| format!("{name}={value}"))
        .collect();
    assert_eq!(
        said,
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
    put(dir.path(), "admin", "cores = 3\n");
    put(dir.path(), "own", "cores = 8\n");
    let mut rules = read_policy(dir.path(), "");
    rules.overrides = vec![cores_override(7, ALICE, "alice")];
    rules
        .published_policies
        .insert(ALICE, Policy::parse_own("x", "cores = 6").expect("good"));
    rules.merge();
    assert_eq!(cores(&rules).0, Some(3));
    // The administrator names no owners. At first Alice is logged in only over the network, then
    // also at the machine itself.
    rules.update_logins(&[
        login("alice", "pts/0", "h9"),
        login("alice", "pts/1", ":pts/0:S.0"),
    ]);
    assert_eq!(cores(&rules).0, Some(3));
    rules.update_logins(&[login("alice", "tty2", "")]);
    assert_eq!(cores(&rules), (Some(7), "pvm owner".into()));
    rules.update_logins(&[]);
    assert_eq!(cores(&rules).0, Some(7), "she was the last one there");
    rules.update_logins(&[login("olga", ":0", ":0")]);
    assert_eq!(cores(&rules).0, Some(3), "it is somebody else's now");
    put(dir.path(), "admin", "cores = 3\nowners = [\"olga\"]\n");
    assert_eq!(rules.read_admin(), None);
    rules.update_logins(&[login("alice", "tty2", "")]);
    assert_eq!(
        cores(&rules).0,
        Some(3),
        "the administrator has named others"
    );
    put(
        dir.path(),
        "admin",
        "cores = 3\nowners = [\"olga\", \"alice\"]\n",
    );
    assert_eq!(rules.read_admin(), None);
    assert_eq!(cores(&rules).0, Some(7));
}

/// Root is an owner of every machine.
#[test]
fn root_is_always_an_owner() {
    let dir = tempfile::tempdir().expect("a folder");
    put(dir.path(), "admin", "cores = 3\nowners = [\"olga\"]\n");
    put(dir.path(), "own", "cores = 8\n");
    let places = PolicyPaths {
        user: dir.path().join("own"),
        admin: dir.path().join("admin"),
        overrides: dir.path().join("w"),
    };
    let rules = HostPolicy::read(
        places,
        VmUser {
            uid: 0,
            name: "root".into(),
            defaults: Policy::default(),
        },
    );
    assert_eq!(cores(&rules).0, Some(8));
}

/// A malformed file is refused, and its previous content stays in force until it is corrected or
/// removed.
#[test]
fn malformed_file_keeps_previous_policy() {
    let dir = tempfile::tempdir().expect("a folder");
    let put = |text: &str| put(dir.path(), "own", text);
    put("cores = 2\n");
    let mut rules = read_policy(dir.path(), "");
    put("cores = 3\nnever = 5\n");
    let wrong = rules.read_user_policy().expect("wrong");
    assert!(
        wrong.contains("own:2: ") && wrong.ends_with("what was said before stays"),
        "{wrong}"
    );
    assert_eq!(
        (rules.merged().policy.cores, rules.errors()),
        (Some(2), vec![wrong])
    );
    put("cores = 4\n");
    assert_eq!(rules.read_user_policy(), None);
    assert_eq!(
        (rules.merged().policy.cores, rules.errors().len()),
        (Some(4), 0)
    );
    put("owners = [\"me\"]\n");
    assert!(
        rules
            .read_user_policy()
            .expect("not his to say")
            .contains("administrator")
    );
    fs::remove_file(dir.path().join("own")).expect("the test's own file");
    assert_eq!(rules.read_user_policy(), None);
    assert_eq!(rules.merged().policy.cores, None);
}

/// A malformed published policy is refused, and the previous one stays in force until it is
/// withdrawn.
#[test]
fn malformed_published_policy_keeps_previous_one() {
    let dir = tempfile::tempdir().expect("a folder");
    let words = dir.path().join("words");
    fs::create_dir(&words).expect("the test's own folder");
    let mut rules = read_policy(dir.path(), "");
    let uid = Uid::effective().as_raw();
    let publish = |text: Option<&str>| {
        published_policy::write(&words, uid, text).expect("the test's own folder")
    };
    publish(Some("leave_after = 30\n"));
    assert_eq!(rules.read_overrides(), Vec::<String>::new());
    let nice = |rules: &HostPolicy| rules.merged().policy.nice;
    publish(Some("nice = 4\n"));
    assert_eq!(
        (rules.read_overrides(), nice(&rules)),
        (Vec::new(), Some(4))
    );
    publish(Some("nice = 5\n\nnice = 6\n"));
    let wrong = rules.read_overrides();
    assert!(
        wrong.len() == 1 && wrong[0].contains(".policy.toml:3: duplicate key"),
        "{wrong:?}"
    );
    assert_eq!((rules.errors(), nice(&rules)), (wrong, Some(4)));
    publish(None);
    assert_eq!(
        (rules.read_overrides(), nice(&rules), rules.errors()),
        (Vec::new(), None, Vec::new())
    );
}

/// End of the report about a malformed file without previous valid content.
const CLOSED_HOST_SUFFIX: &str = "; until that is mended no guest is welcome here";

/// A file that never had valid content closes the host to guests until the file is corrected or
/// removed.
#[test]
fn file_never_valid_closes_host_until_fixed() {
    let dir = tempfile::tempdir().expect("a folder");
    for file in ["admin", "own"] {
        let read = |rules: &mut HostPolicy| {
            if file == "admin" {
                rules.read_admin()
            } else {
                rules.read_user_policy()
            }
        };
        put(dir.path(), file, "never = [\"always\"]\ncorse = 2\n");
        let mut rules = read_policy(dir.path(), "");
        let why = rules
            .policy_unknown()
            .expect("nobody knows what it forbids")
            .to_string();
        assert!(
            why.contains(&format!("{file}:2: unknown field `corse`"))
                && why.ends_with(CLOSED_HOST_SUFFIX),
            "{why}"
        );
        assert_eq!(rules.errors(), std::slice::from_ref(&why));
        assert_eq!(
            (read(&mut rules), rules.policy_unknown()),
            (Some(why.clone()), Some(why.as_str())),
            "it is still wrong"
        );
        put(dir.path(), file, "cores = 2\n");
        assert_eq!((read(&mut rules), rules.policy_unknown()), (None, None));
        // From now on the file has valid content before each error.
        put(dir.path(), file, "corse = 3\n");
        assert!(read(&mut rules).is_some_and(|says| says.ends_with("what was said before stays")));
        assert_eq!(
            (rules.policy_unknown(), rules.merged().policy.cores),
            (None, Some(2))
        );
        fs::remove_file(dir.path().join(file)).expect("the test's own file");
        assert_eq!(read(&mut rules), None);
        put(dir.path(), file, "corse = 3\n");
        assert!(
            read(&mut rules).is_some_and(|says| says.ends_with(CLOSED_HOST_SUFFIX)),
            "what it said was taken back"
        );
        assert!(rules.policy_unknown().is_some());
        fs::remove_file(dir.path().join(file)).expect("the test's own file");
        assert_eq!((read(&mut rules), rules.policy_unknown()), (None, None));
    }
}

#[test]
fn unreadable_file_closes_host() {
    let dir = tempfile::tempdir().expect("a folder");
    fs::create_dir(dir.path().join("admin")).expect("the test's own folder");
    let why = read_policy(dir.path(), "")
        .policy_unknown()
        .expect("nobody knows what it forbids")
        .to_string();
    assert!(
        why.contains("admin cannot be read: ") && why.ends_with(CLOSED_HOST_SUFFIX),
        "{why}"
    );
}

/// A published policy that never had valid content closes the host to guests until the policy is
/// corrected or withdrawn.
#[test]
fn published_policy_never_valid_closes_host() {
    let dir = tempfile::tempdir().expect("a folder");
    let words = dir.path().join("words");
    fs::create_dir(&words).expect("the test's own folder");
    let uid = Uid::effective().as_raw();
    let publish = |text: Option<&str>| {
        published_policy::write(&words, uid, text).expect("the test's own folder")
    };
    publish(Some("nice = 5\nnice = 6\n"));
    let mut rules = read_policy(dir.path(), "");
    let why = rules
        .policy_unknown()
        .expect("nobody knows what it forbids")
        .to_string();
    assert!(
        why.contains(".policy.toml:2: duplicate key") && why.ends_with(CLOSED_HOST_SUFFIX),
        "{why}"
    );
    assert_eq!(
        (rules.errors(), rules.read_overrides()),
        (vec![why.clone()], vec![why.clone()])
    );
    assert_eq!(
        rules.policy_unknown(),
        Some(why.as_str()),
        "it is still wrong"
    );
    publish(Some("nice = 5\n"));
    assert_eq!(
        (rules.read_overrides(), rules.policy_unknown()),
        (Vec::new(), None)
    );
    publish(Some("nice = 5\nnice = 6\n"));
    assert!(rules.read_overrides()[0].ends_with("what was said before stays"));
    assert_eq!(
        (rules.policy_unknown(), rules.merged().policy.nice),
        (None, Some(5))
    );
    publish(None);
    assert_eq!(
        (rules.read_overrides(), rules.policy_unknown()),
        (Vec::new(), None)
    );
}

/// A malformed published policy closes the host to guests only if its user is an owner.
#[test]
fn malformed_policy_of_non_owner_is_ignored() {
    let dir = tempfile::tempdir().expect("a folder");
    put(dir.path(), "admin", "owners = [\"olga\"]\n");
    let mut rules = read_policy(dir.path(), "");
    rules.invalid_published.insert(OLGA + 1, "wrong".into());
    rules.merge();
    assert_eq!(rules.policy_unknown(), None);
    put(dir.path(), "admin", "nice = 1\n");
    assert_eq!(
        (rules.read_admin(), rules.policy_unknown()),
        (None, Some("wrong")),
        "anybody is an owner now"
    );
}

#[test]
fn blocked_users_are_given_by_name_or_uid() {
    let dir = tempfile::tempdir().expect("a folder");
    let rules = read_policy(
        dir.path(),
        "[blocked]\nusers = [\"root\", \"12345\", 12346]",
    );
    assert_eq!(
        (rules.blocked_uids(), rules.errors()),
        (&[0, 12345, 12346][..], Vec::new())
    );
}

/// Returns the report about a blocked user without an account on this host.
fn unknown_user_report(dir: &Path, file_and_line: &str, name: &str) -> String {
    let place = dir.join(file_and_line);
    let place = place.display();
    format!(
        "{place}: blocked user {name:?}: no account of this host has this name; nobody is kept away by it"
    )
}

/// A blocked user without an account on this host is reported with file and line; the rest of the
/// file is in force.
#[test]
fn unknown_blocked_user_is_reported_with_line() {
    let dir = tempfile::tempdir().expect("a folder");
    let users = |names: &str| {
        put(
            dir.path(),
            "admin",
            &format!("nice = 3\n[blocked]\nusers = [{names}]\n"),
        )
    };
    users("\"root\",\n\"nobody-has-this-name\",\n99999999999,\n12345");
    let mut rules = read_policy(dir.path(), "");
    assert_eq!(
        (
            rules.blocked_uids(),
            rules.merged().policy.nice,
            rules.policy_unknown()
        ),
        (&[0, 12345][..], Some(3), None)
    );
    let told = [
        ("admin:4", "nobody-has-this-name"),
        ("admin:5", "99999999999"),
    ];
    assert_eq!(
        rules.errors(),
        told.map(|(line, name)| unknown_user_report(dir.path(), line, name))
    );
    // The file itself is valid, so it is accepted again by the next read.
    assert_eq!(
        (rules.read_admin(), rules.blocked_uids()),
        (None, &[0, 12345][..])
    );
    users("\"root\"");
    assert_eq!(
        (rules.read_admin(), rules.blocked_uids(), rules.errors()),
        (None, &[0][..], Vec::new())
    );
}

/// Blocked users without an account are reported only if the list that names them is in force.
#[test]
fn only_effective_unknown_users_are_reported() {
    let dir = tempfile::tempdir().expect("a folder");
    put(
        dir.path(),
        "own",
        "[blocked]\nusers = [\"nobody-has-this-name\"]\n",
    );
    put(dir.path(), "admin", "[blocked]\nusers = []\n");
    let mut rules = read_policy(dir.path(), "");
    assert_eq!(
        rules.errors(),
        Vec::<String>::new(),
        "the administrator's list counts"
    );
    rules.update_logins(&[login("alice", "tty2", "")]);
    assert_eq!(
        rules.errors(),
        [unknown_user_report(
            dir.path(),
            "own:2",
            "nobody-has-this-name"
        )],
        "she is the owner now"
    );
}

/// The number of reports about blocked users without an account, and the length of their names, are
/// limited.
#[test]
fn unknown_user_reports_are_limited() {
    let dir = tempfile::tempdir().expect("a folder");
    let long = "x".repeat(UNKNOWN_NAME_BYTES_MAX + 1);
    let names: Vec<String> = (0..100).map(|n| format!("\"{long}{n}\"")).collect();
    put(
        dir.path(),
        "own",
        &format!("[blocked]\nusers = [\"root\", {}, 12345]", names.join(", ")),
    );
    let rules = read_policy(dir.path(), "");
    assert_eq!(
        (rules.blocked_uids(), rules.errors().len()),
        (&[0, 12345][..], UNKNOWN_USERS_MAX)
    );
    assert_eq!(
        rules.errors()[0],
        unknown_user_report(dir.path(), "own:2", &long[1..])
    );
}

/// If the administrator names owners, overrides and published policies of other users are ignored.
#[test]
fn only_named_owners_count() {
    let dir = tempfile::tempdir().expect("a folder");
    put(dir.path(), "admin", "owners = [\"olga\", \"21009\"]\n");
    let mut rules = read_policy(dir.path(), "");
    rules.overrides = vec![cores_override(1, OLGA + 1, "mallory")];
    rules
        .published_policies
        .insert(OLGA + 1, Policy::parse_own("x", "nice = 1").expect("good"));
    rules.merge();
    assert_eq!(
        (rules.merged().policy.cores, rules.merged().policy.nice),
        (None, None)
    );
    // An owner without an account on this host is named by uid.
    rules.overrides = vec![cores_override(1, 21_009, "21009")];
    rules
        .published_policies
        .insert(21_009, Policy::parse_own("x", "nice = 2").expect("good"));
    rules.merge();
    assert_eq!(
        (rules.merged().policy.cores, rules.merged().policy.nice),
        (Some(1), Some(2))
    );
}

/// Root may name any path as the administrator's; other users may name only a path that belongs to
/// root and that no other user can change.
#[test]
fn admin_path_must_belong_to_root() {
    let dir = tempfile::tempdir().expect("a folder");
    put(dir.path(), "admin", "");
    let (named, usual) = (dir.path().join("admin"), Path::new(ADMIN_FILE));
    assert_eq!(
        trusted_path(named.clone(), usual, Uid::from_raw(0)),
        (named.clone(), None)
    );
    // Paths that belong to root and that no other user can change are accepted from all users.
    for of_root in [Path::new("/etc/passwd"), Path::new("/var/tmp"), usual] {
        assert_eq!(
            trusted_path(of_root.to_path_buf(), usual, Uid::from_raw(ALICE)),
            (of_root.to_path_buf(), None)
        );
    }
    fs::set_permissions(&named, PermissionsExt::from_mode(0o666)).expect("the test's own file");
    for other in [named, PathBuf::from("/dev/null"), dir.path().join("none")] {
        let (place, doubt) = trusted_path(other.clone(), usual, Uid::from_raw(ALICE));
        assert!(
            place == usual && doubt.is_some_and(|says| says.contains("is not root's")),
            "{}",
            other.display()
        );
    }
}
