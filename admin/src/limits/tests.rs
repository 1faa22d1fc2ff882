use super::*;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;

const TEXT: &str = "\
# The lab's limits.
tasks = 100 # enough

[users.alice]
# She has a grant.
memory = \"8G\"
";

fn edit(text: &str, changes: &[(Place<'_>, &str, &str)]) -> Result<String> {
    let mut document: DocumentMut = text.parse()?;
    for (place, key, value) in changes {
        Change::parse(*place, key, value)?.apply(&mut document)?;
    }
    Ok(document.to_string())
}

/// Comments and the order of the text stay.
#[test]
fn edits_keep_comments() {
    let changes = [
        (Place::Everyone, "tasks", "50"),
        (Place::User("alice"), "memory", "unlimited"),
        (Place::User("alice"), "tasks", "7"),
        (Place::Group("students"), "image_bytes", "1048576"),
        (Place::Everyone, "no_new_privs", "false"),
    ];
    let expected = "\
# The lab's limits.
tasks = 50 # enough
no_new_privs = false

[users.alice]
# She has a grant.
memory = \"unlimited\"
tasks = 7

[groups.students]
image_bytes = \"1M\"
";
    assert_eq!(edit(TEXT, &changes).expect("valid"), expected);
}

/// The value `default` removes a setting, and the table of a user without settings.
#[test]
fn settings_are_removed() {
    let changes = [
        (Place::User("alice"), "memory", "default"),
        (Place::Everyone, "tasks", "default"),
        (Place::Group("none"), "tasks", "default"),
    ];
    let text = edit(TEXT, &changes).expect("valid");
    assert_eq!(
        Settings::parse(Path::new("x"), &text).expect("valid"),
        Settings::default()
    );
    assert!(!text.contains("alice") && !text.contains("none"), "{text}");
}

#[test]
fn users_are_denied_and_allowed() {
    let mut document: DocumentMut = TEXT.parse().expect("valid");
    let mut deny = |user, is_denied| {
        let change = Change::Deny { user, is_denied };
        change.apply(&mut document).expect("valid");
        let settings = Settings::parse(Path::new("x"), &document.to_string()).expect("valid");
        settings
            .denied_users()
            .map(str::to_string)
            .collect::<Vec<_>>()
    };
    assert_eq!(deny("mallory", true), ["mallory"]);
    assert_eq!(deny("mallory", true), ["mallory"]);
    assert_eq!(deny("a\"b", true), ["a\"b", "mallory"]);
    assert_eq!(deny("mallory", false), ["a\"b"]);
    assert_eq!(deny("a\"b", false), [""; 0]);
}

/// Wrong keys and values are refused with what is accepted.
#[test]
fn wrong_changes_are_refused() {
    let cases = [
        (
            Place::Everyone,
            "taks",
            "1",
            "the settings are tasks, memory",
        ),
        (
            Place::Everyone,
            "tasks",
            "0",
            "expected a number from 1 to 100000",
        ),
        (Place::Everyone, "tasks", "", "expected a number"),
        (
            Place::Everyone,
            "memory",
            "much",
            "or default, and not \"much\"",
        ),
        (
            Place::Everyone,
            "no_new_privs",
            "1",
            "expected true, false or default",
        ),
        (
            Place::User("a"),
            "no_new_privs",
            "true",
            "applies to all users",
        ),
    ];
    for (place, key, value, expected) in cases {
        let error = edit(TEXT, &[(place, key, value)]).expect_err(expected);
        assert!(error.to_string().contains(expected), "{error}");
    }
    let inline = "users = { alice = { tasks = 1 } }";
    let error = edit(inline, &[(Place::User("alice"), "tasks", "2")]).expect_err("one line");
    assert!(error.to_string().contains("written in one line"), "{error}");
}

/// A file is replaced as a whole, and not at all if it was or would become invalid.
#[test]
fn files_are_changed_or_stay() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("new/service.toml");
    let change = |key, value| {
        let change = Change::parse(Place::User("alice"), key, value)?;
        change_file(&path, &[change])
    };
    let settings = change("tasks", "3").expect("valid");
    assert_eq!(settings, Settings::load(&path).expect("valid"));
    let text = fs::read_to_string(&path).expect("a file");
    assert!(text.starts_with(NEW_FILE_TEXT) && text.ends_with("[users.alice]\ntasks = 3\n"));
    let long_name = "n".repeat(sempa_service_settings::NAME_BYTES_MAX + 1);
    let deny = Change::Deny {
        user: &long_name,
        is_denied: true,
    };
    let error = change_file(&path, &[deny]).expect_err("no name");
    assert!(
        format!("{error:#}").contains("would not be valid"),
        "{error:#}"
    );
    assert_eq!(fs::read_to_string(&path).expect("a file"), text);
    fs::write(&path, "tasks = no\n").expect("the test's own file");
    let error = format!("{:#}", change("tasks", "4").expect_err("invalid"));
    assert!(
        error.contains("nothing was changed") && error.contains("line 1"),
        "{error}"
    );
    fs::write(&path, "").expect("the test's own file");
    fs::set_permissions(&path, Permissions::from_mode(0o666)).expect("the test's own file");
    let error = format!("{:#}", change("tasks", "4").expect_err("untrusted"));
    assert!(error.contains("mode 0666"), "{error}");
}
