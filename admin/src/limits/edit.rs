//! Changes of the settings' text. Comments and the order of the text are kept. Pure.

use anyhow::{Result, bail};
use sempa_service_settings::{Limit, LimitKind};
use toml_edit::{Array, DocumentMut, Item, Table, Value, value};

const NO_NEW_PRIVS_KEY: &str = "no_new_privs";
/// Value of a command line that removes a setting.
const DEFAULT_WORD: &str = "default";

/// The users whose setting is changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place<'a> {
    Everyone,
    User(&'a str),
    Group(&'a str),
}

/// A change of one setting.
#[derive(Clone, Debug)]
pub(super) enum Change<'a> {
    /// Sets a key, or removes it if there is no value.
    Set {
        place: Place<'a>,
        key: &'static str,
        value: Option<Value>,
    },
    Deny {
        user: &'a str,
        is_denied: bool,
    },
}

impl<'a> Change<'a> {
    /// Parses a change as on the command line.
    ///
    /// # Errors
    /// The key is unknown or the value is not accepted. The error names what is accepted.
    pub(super) fn parse(place: Place<'a>, key: &str, text: &str) -> Result<Self> {
        let is_default = text == DEFAULT_WORD;
        if key == NO_NEW_PRIVS_KEY {
            if place != Place::Everyone {
                bail!("{key} applies to all users; set it without a user or group");
            }
            let value = match text {
                "true" => Some(true.into()),
                "false" => Some(false.into()),
                _ if is_default => None,
                _ => bail!("{key}: expected true, false or {DEFAULT_WORD}, and not {text:?}"),
            };
            let key = NO_NEW_PRIVS_KEY;
            return Ok(Self::Set { place, key, value });
        }
        let Some(kind) = LimitKind::from_key(key) else {
            let keys = LimitKind::ALL.map(LimitKind::key).join(", ");
            bail!("unknown setting {key:?}; the settings are {keys} and {NO_NEW_PRIVS_KEY}");
        };
        let value = match is_default {
            true => None,
            false => match kind.parse_limit(text) {
                Ok(limit) => Some(limit_value(kind, limit)),
                Err(expected) => bail!("{key}: {expected} or {DEFAULT_WORD}, and not {text:?}"),
            },
        };
        let key = kind.key();
        Ok(Self::Set { place, key, value })
    }

    /// Applies the change to a valid settings text.
    pub(super) fn apply(&self, document: &mut DocumentMut) -> Result<()> {
        match self {
            Self::Set { place, key, value } => {
                let table = table_of(document, *place)?;
                match value {
                    Some(new) => set_value(table, key, new.clone()),
                    None => drop(table.remove(key)),
                }
                remove_if_empty(document, *place);
                Ok(())
            }
            Self::Deny { user, is_denied } => change_denied(document, user, *is_denied),
        }
    }
}

fn limit_value(kind: LimitKind, limit: Limit) -> Value {
    match limit {
        Limit::AtMost(number) if !kind.range().is_bytes => number.cast_signed().into(),
        limit => kind.display(limit).to_string().into(),
    }
}

/// Replaces a value and keeps the comment behind the old one.
fn set_value(table: &mut Table, key: &str, mut new: Value) {
    match table.get_mut(key).and_then(Item::as_value_mut) {
        Some(old) => {
            *new.decor_mut() = old.decor().clone();
            *old = new;
        }
        None => drop(table.insert(key, value(new))),
    }
}

/// Returns the table of a user or group, which is created if there is none.
fn table_of<'d>(document: &'d mut DocumentMut, place: Place<'_>) -> Result<&'d mut Table> {
    let root = document.as_table_mut();
    let (kind, name) = match place {
        Place::Everyone => return Ok(root),
        Place::User(name) => ("users", name),
        Place::Group(name) => ("groups", name),
    };
    let not_edited = || {
        anyhow::anyhow!(
            "[{kind}.{name}] is written in one line in the settings; write it as a table of its \
             own, so that it can be changed"
        )
    };
    let implicit = || {
        let mut table = Table::new();
        table.set_implicit(true);
        Item::Table(table)
    };
    let tables = root.entry(kind).or_insert_with(implicit);
    let tables = tables.as_table_mut().ok_or_else(not_edited)?;
    let table = tables
        .entry(name)
        .or_insert_with(|| Item::Table(Table::new()));
    table.as_table_mut().ok_or_else(not_edited)
}

fn remove_if_empty(document: &mut DocumentMut, place: Place<'_>) {
    let (kind, name) = match place {
        Place::Everyone => return,
        Place::User(name) => ("users", name),
        Place::Group(name) => ("groups", name),
    };
    let tables = document.get_mut(kind).and_then(Item::as_table_mut);
    let Some(tables) = tables else { return };
    let table = tables.get(name).and_then(Item::as_table);
    if table.is_some_and(Table::is_empty) {
        tables.remove(name);
    }
}

fn change_denied(document: &mut DocumentMut, user: &str, is_denied: bool) -> Result<()> {
    let item = document
        .as_table_mut()
        .entry("deny")
        .or_insert_with(|| value(Array::new()));
    let Some(names) = item.as_array_mut() else {
        bail!("deny is not a list in the settings");
    };
    names.retain(|name| name.as_str() != Some(user));
    if is_denied {
        names.push(user);
    }
    if names.is_empty() {
        document.as_table_mut().remove("deny");
    }
    Ok(())
}
