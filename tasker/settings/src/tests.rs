use super::*;
use proptest::prelude::*;
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};

fn parse(text: &str) -> Result<Settings, String> {
    Settings::parse(Path::new("s.toml"), text).map_err(|error| error.to_string())
}

#[test]
fn empty_settings_have_the_defaults() {
    let settings = parse("").expect("valid");
    assert_eq!(settings, Settings::default());
    assert!(settings.no_new_privs && !settings.denies("alice"));
    for kind in LimitKind::ALL {
        assert_eq!(settings.of_other_users().get(kind), kind.default_limit());
    }
}

/// A user's own limit has priority over those of groups, of which the smallest counts, and these
/// over the limits for all users.
#[test]
fn limits_have_priorities() {
    let settings = parse(
        r#"
        no_new_privs = false
        deny = ["mallory", "trudy"]
        tasks = 100
        memory = "8G"
        descriptors = "unlimited"
        [users.alice]
        tasks = 7
        [groups.students]
        tasks = 20
        memory = "unlimited"
        image_bytes = 1048576
        [groups.guests]
        tasks = 30
        memory = "512m"
        "#,
    )
    .expect("valid");
    assert!(!settings.no_new_privs);
    assert!(settings.denies("trudy") && !settings.denies("alice"));
    let limits = |name, groups: &[&str]| {
        let limits = settings.of_user(name, groups);
        LimitKind::ALL.map(|kind| kind.display(limits.get(kind)).to_string())
    };
    let defaults = ["100", "8G", "unlimited", "1024", "64G"];
    assert_eq!(limits("bob", &["staff"]), defaults);
    assert_eq!(
        limits("bob", &["staff", "students"]),
        ["20", "unlimited", "unlimited", "1024", "1M"]
    );
    assert_eq!(
        limits("alice", &["students", "guests"]),
        ["7", "512M", "unlimited", "1024", "1M"]
    );
    let of_group = |kind| settings.of_group("guests", kind);
    assert_eq!(of_group(LimitKind::Tasks), Some(Limit::AtMost(30)));
    assert_eq!(of_group(LimitKind::Descriptors), None);
}

#[test]
fn limit_permits_its_maximum() {
    assert!(Limit::AtMost(5).permits(5) && !Limit::AtMost(5).permits(6));
    assert!(Limit::Unlimited.permits(u64::MAX) && Limit::Unlimited > Limit::AtMost(u64::MAX));
}

/// Each error names the file, the line, and the accepted values.
#[test]
fn errors_name_line_and_accepted_values() {
    let long_name = format!("deny = [\"{}\"]", "n".repeat(NAME_BYTES_MAX + 1));
    let many_names = format!("deny = [{}]", "\"n\", ".repeat(ENTRIES_MAX + 1));
    let long_text = " ".repeat(SETTINGS_BYTES_MAX as usize + 1);
    let cases = [
        ("tasks =\n", 1, "expected"),
        ("\ntasks = 1\ntasks = 2", 3, "duplicate key"),
        (
            "\n\ntaks = 1",
            3,
            "unknown key \"taks\"; the accepted keys are no_new_privs, deny, tasks",
        ),
        (
            "[users.alice]\ndeny = 1",
            2,
            "unknown key \"deny\"; the accepted keys are tasks, memory",
        ),
        (
            "no_new_privs = 1",
            1,
            "no_new_privs: expected true or false",
        ),
        ("tasks = 0", 1, "tasks: expected a number from 1 to 100000"),
        ("tasks = -1", 1, "tasks: expected a number"),
        ("tasks = 1.5", 1, "tasks: expected a number"),
        ("tasks = \"5\"", 1, "tasks: expected a number"),
        (
            "tasks = \"unlimited\"",
            1,
            "tasks: expected a number from 1 to 100000",
        ),
        ("tasks = true", 1, "tasks: expected a number"),
        (
            "tasks = 99999999999999999999999",
            1,
            "tasks: expected a number",
        ),
        (
            "descriptors = 3",
            1,
            "from 64 to 1073741824 or \"unlimited\"",
        ),
        (
            "\nmemory = \"lots\"",
            2,
            "memory: expected a number of bytes or a text such as \"512M\"",
        ),
        ("memory = \"+4G\"", 1, "from 1M to 1048576T"),
        ("memory = \"99999999T\"", 1, "memory: expected"),
        ("image_bytes = 5", 1, "image_bytes: expected"),
        ("control_groups = []", 1, "control_groups: expected"),
        ("deny = \"alice\"", 1, "deny: expected a list of user names"),
        (
            "deny = [\n\"a\",\n5]",
            3,
            "deny: expected a list of user names",
        ),
        (
            "deny = [\"\"]",
            1,
            "deny: expected a name of 1 to 256 bytes",
        ),
        ("deny = [\"a b\"]", 1, "without spaces"),
        (&long_name, 1, "deny: expected a name"),
        (&many_names, 1, "deny has 1025 entries; at most 1024"),
        (
            "users = 5",
            1,
            "users: expected tables such as [users.NAME]",
        ),
        (
            "[users]\nalice = 5",
            2,
            "users: expected tables such as [users.NAME]",
        ),
        ("[groups.\"a:b\"]\n", 1, "groups: expected a name"),
        (&long_text, 1, "the file has more than 262144 bytes"),
    ];
    for (text, line, expected) in cases {
        let error = parse(text).expect_err(expected);
        let place = format!("s.toml, line {line}: ");
        assert!(error.starts_with(&place), "{text}: {error}");
        assert!(error.contains(expected), "{text}: {error}");
    }
}

#[test]
fn path_is_configurable() {
    assert_eq!(settings_path(None), Path::new(DEFAULT_SETTINGS_PATH));
    assert_eq!(
        settings_path(Some("".into())),
        Path::new(DEFAULT_SETTINGS_PATH)
    );
    assert_eq!(settings_path(Some("/x".into())), Path::new("/x"));
}

/// Settings that other users can have written are refused; a missing file is no error.
#[test]
fn files_are_loaded_or_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("service.toml");
    let load = |path: &Path| Settings::load(path).map_err(|error| error.to_string());
    assert_eq!(load(&path), Ok(Settings::default()));
    assert_eq!(load(&dir.path().join("none/x")), Ok(Settings::default()));
    fs::write(&path, "tasks = 3").expect("written");
    fs::set_permissions(&path, Permissions::from_mode(0o644)).expect("the test's own file");
    let settings = load(&path).expect("valid");
    let tasks = settings.of_other_users().get(LimitKind::Tasks);
    assert_eq!(tasks, Limit::AtMost(3));
    let link = dir.path().join("link");
    symlink(&path, &link).expect("a link");
    let error = load(&link).expect_err("a link");
    assert!(
        error.contains("link is not used, because it is a symbolic link"),
        "{error}"
    );
    fs::set_permissions(&path, Permissions::from_mode(0o666)).expect("the test's own file");
    let error = load(&path).expect_err("writable by all");
    assert!(
        error.contains("mode 0666") && error.contains("only root may change"),
        "{error}"
    );
    fs::set_permissions(&path, Permissions::from_mode(0o644)).expect("the test's own file");
    fs::write(&path, vec![b' '; SETTINGS_BYTES_MAX as usize + 1]).expect("written");
    let error = load(&path).expect_err("long");
    assert!(error.contains("more than 262144 bytes"), "{error}");
    fs::remove_file(&path).expect("the test's own file");
    fs::create_dir(&path).expect("the test's own directory");
    let error = load(&path).expect_err("a directory");
    assert!(error.contains("is not a regular file"), "{error}");
}

proptest! {
    /// No text makes the parser fail otherwise.
    #[test]
    fn any_text_is_parsed_or_refused(text in "(?s).{0,200}") {
        let _ = parse(&text);
    }

    #[test]
    fn displayed_limit_parses_unchanged(number: u64, kind_index in 0..LimitKind::ALL.len()) {
        let kind = LimitKind::ALL[kind_index];
        let range = kind.range();
        let limit = Limit::AtMost(range.min + number % (range.max - range.min + 1));
        let text = kind.display(limit).to_string();
        prop_assert_eq!(kind.parse_limit(&text), Ok(limit));
    }
}
