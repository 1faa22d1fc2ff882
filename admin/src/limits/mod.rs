//! `limits`: shows and changes the settings of the tasker service.

mod edit;

use crate::outcome::{Outcome, refuse_unless_root};
use crate::table::format_table;
use crate::users::groups_of;
use anyhow::{Context, Result, bail};
use clap::Args;
use edit::{Change, Place};
use sempa_service_settings::{
    LimitKind, SETTINGS_BYTES_MAX, SETTINGS_VARIABLE, Settings, file_error, locate, settings_path,
};
use sempa_trusted_file::{FileError, MissingDir, Replace};
use serde_json::{Value, json};
use std::path::Path;
use toml_edit::DocumentMut;

/// First lines of a new file.
const NEW_FILE_TEXT: &str = "# Settings of the tasker service, see pvm-admin(8).\n";

#[derive(Debug, Args)]
pub(crate) struct LimitsOptions {
    /// A user; without one, the limits of all users who are not named
    user: Option<String>,
    /// The members of a group, instead of a user
    #[arg(long, value_name = "NAME", conflicts_with = "user")]
    group: Option<String>,
    /// Set a limit (tasks, memory, descriptors, control_groups, image_bytes) or, for all users,
    /// no_new_privs; the value 'default' removes the setting
    #[arg(long, value_name = "KEY=VALUE", value_parser = parse_assignment, num_args = 1..)]
    set: Vec<(String, String)>,
    /// Run no tasks of the user
    #[arg(long, requires = "user", conflicts_with = "allow")]
    deny: bool,
    /// Run tasks of the user again
    #[arg(long, requires = "user")]
    allow: bool,
    /// Print one JSON value
    #[arg(long)]
    json: bool,
}

fn parse_assignment(text: &str) -> Result<(String, String), String> {
    let (key, value) = text
        .split_once('=')
        .ok_or("expected KEY=VALUE, such as tasks=100 or memory=8G")?;
    Ok((key.trim().to_string(), value.trim().to_string()))
}

impl LimitsOptions {
    fn place(&self) -> Place<'_> {
        match (&self.user, &self.group) {
            (Some(user), _) => Place::User(user),
            (None, Some(group)) => Place::Group(group),
            (None, None) => Place::Everyone,
        }
    }

    fn changes(&self) -> Result<Vec<Change<'_>>> {
        let mut changes = Vec::new();
        for (key, value) in &self.set {
            changes.push(Change::parse(self.place(), key, value)?);
        }
        if let Some(user) = self.user.as_deref().filter(|_| self.deny || self.allow) {
            changes.push(Change::Deny {
                user,
                is_denied: self.deny,
            });
        }
        Ok(changes)
    }
}

pub(crate) fn run(options: &LimitsOptions) -> Result<Outcome> {
    let path = settings_path(std::env::var_os(SETTINGS_VARIABLE));
    let changes = options.changes()?;
    if changes.is_empty() {
        let settings = Settings::load(&path)?;
        print!("{}", show(&settings, options, &path));
        return Ok(Outcome::Done);
    }
    let reason = "only root may change the settings of the service";
    if let Some(refusal) = refuse_unless_root("limits --set", reason) {
        return Ok(refusal);
    }
    let settings = change_file(&path, &changes)?;
    print!("{}", show(&settings, options, &path));
    if !options.json {
        println!("running taskers keep their limits; a tasker reads the settings when it starts");
    }
    Ok(Outcome::Done)
}

/// Changes the settings file. The new text is checked before the file is replaced.
fn change_file(path: &Path, changes: &[Change<'_>]) -> Result<Settings> {
    let error = |error| file_error(path, error);
    let file = locate(path, MissingDir::Create).map_err(error)?;
    let _lock = file.lock().map_err(error)?;
    let mut text = String::new();
    let first_lines = match file.read(&mut text, SETTINGS_BYTES_MAX) {
        Ok(()) => "",
        Err(FileError::Missing) => NEW_FILE_TEXT,
        Err(cause) => return Err(error(cause).into()),
    };
    // Errors of the settings name the line and the accepted values, those of the editor do not.
    Settings::parse(path, &text).context("nothing was changed; correct the file first")?;
    let mut document: DocumentMut = text.parse().with_context(|| path.display().to_string())?;
    for change in changes {
        change.apply(&mut document)?;
    }
    let new_text = format!("{first_lines}{document}");
    let settings = Settings::parse(path, &new_text)
        .context("nothing was changed, because the settings would not be valid")?;
    if new_text.len() as u64 > SETTINGS_BYTES_MAX {
        bail!(
            "nothing was changed, because the settings would be longer than {SETTINGS_BYTES_MAX} bytes"
        );
    }
    file.write(new_text.as_bytes(), Replace::Existing)
        .map_err(error)?;
    Ok(settings)
}

/// Formats the limits that the options select.
fn show(settings: &Settings, options: &LimitsOptions, path: &Path) -> String {
    let (title, limits) = selected_limits(settings, options);
    let is_denied = options.user.as_deref().map(|user| settings.denies(user));
    if options.json {
        let limits: serde_json::Map<String, Value> = limits
            .into_iter()
            .map(|(key, text)| (key.to_string(), json!(text)))
            .collect();
        let value = json!({
            "settings": path, "user": options.user, "group": options.group, "limits": limits,
            "denied": is_denied, "no_new_privs": settings.no_new_privs,
            "denied_users": settings.denied_users().collect::<Vec<_>>(),
            "named_users": settings.named_users().collect::<Vec<_>>(),
            "named_groups": settings.named_groups().collect::<Vec<_>>(),
        });
        return format!("{value}\n");
    }
    let rows: Vec<Vec<String>> = limits
        .into_iter()
        .map(|(key, text)| vec![format!("  {key}"), text.unwrap_or_else(|| "not set".into())])
        .collect();
    let mut text = format!("{title} ({}):\n{}", path.display(), format_table(&rows));
    if is_denied == Some(true) {
        text.push_str("the service runs no tasks of this user\n");
    }
    if options.user.is_none() && options.group.is_none() {
        text.push_str(&format!("  no_new_privs  {}\n", settings.no_new_privs));
        let mut list = |what: &str, names: Vec<&str>| {
            if !names.is_empty() {
                text.push_str(&format!("{what}: {}\n", names.join(", ")));
            }
        };
        list("users with other limits", settings.named_users().collect());
        list(
            "groups with other limits",
            settings.named_groups().collect(),
        );
        list("users without tasks", settings.denied_users().collect());
    }
    text
}

/// Returns a title and, for each key, the text of the limit; `None` if a group has no such limit.
fn selected_limits(
    settings: &Settings,
    options: &LimitsOptions,
) -> (String, Vec<(&'static str, Option<String>)>) {
    if let Some(group) = &options.group {
        let limit = |kind: LimitKind| {
            let limit = settings.of_group(group, kind);
            (
                kind.key(),
                limit.map(|limit| kind.display(limit).to_string()),
            )
        };
        let title = format!("limits of the members of the group {group}");
        return (title, LimitKind::ALL.map(limit).into());
    }
    let (title, limits) = match &options.user {
        Some(user) => match groups_of(user) {
            Some(groups) => (format!("limits of {user}"), settings.of_user(user, &groups)),
            None => (
                format!("limits of {user}, who has no account on this host"),
                settings.of_user::<&str>(user, &[]),
            ),
        },
        None => (
            "limits of all other users".into(),
            settings.of_other_users(),
        ),
    };
    let limit = |kind: LimitKind| (kind.key(), Some(kind.display(limits.get(kind)).to_string()));
    (title, LimitKind::ALL.map(limit).into())
}

#[cfg(test)]
mod tests;
