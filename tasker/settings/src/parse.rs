//! Parses the text of the settings.

use crate::limits::{LimitKind, PartialLimits};
use crate::{ENTRIES_MAX, NAME_BYTES_MAX, SETTINGS_BYTES_MAX, Settings};
use sempa_proto::text::line_number;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

const NO_NEW_PRIVS_KEY: &str = "no_new_privs";
const DENY_KEY: &str = "deny";
const USERS_KEY: &str = "users";
const GROUPS_KEY: &str = "groups";

/// An error with its place in the text.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ParseError {
    /// Line number, starting at 1.
    pub(crate) line: usize,
    pub(crate) why: String,
}

pub(crate) fn parse(text: &str) -> Result<Settings, ParseError> {
    if text.len() as u64 > SETTINGS_BYTES_MAX {
        return Err(ParseError {
            line: 1,
            why: format!("the file has more than {SETTINGS_BYTES_MAX} bytes"),
        });
    }
    let parser = Parser { text };
    let table = DeTable::parse(text).map_err(|error| {
        let lines: Vec<&str> = error.message().lines().map(str::trim).collect();
        parser.error(error.span().unwrap_or(0..0), lines.join(" "))
    })?;
    let mut settings = Settings::default();
    for (key, value) in table.get_ref() {
        match key.get_ref().as_ref() {
            NO_NEW_PRIVS_KEY => {
                settings.no_new_privs = parser.parse_bool(NO_NEW_PRIVS_KEY, value)?
            }
            DENY_KEY => settings.denied_users = parser.parse_names(DENY_KEY, value)?,
            USERS_KEY => settings.users = parser.parse_overrides(USERS_KEY, value)?,
            GROUPS_KEY => settings.groups = parser.parse_overrides(GROUPS_KEY, value)?,
            name => match LimitKind::from_key(name) {
                Some(kind) => parser.parse_limit(kind, value, &mut settings.limits)?,
                None => {
                    let keys = [NO_NEW_PRIVS_KEY, DENY_KEY];
                    let other_keys = format!(", [{USERS_KEY}.NAME], [{GROUPS_KEY}.NAME]");
                    return Err(parser.unknown_key(key, &keys, &other_keys));
                }
            },
        }
    }
    Ok(settings)
}

struct Parser<'a> {
    text: &'a str,
}

impl Parser<'_> {
    fn error(&self, span: Range<usize>, why: String) -> ParseError {
        ParseError {
            line: line_number(self.text, span.start),
            why,
        }
    }

    /// Returns the error of an unknown key, with the keys that are accepted in its place.
    fn unknown_key(
        &self,
        key: &Spanned<impl std::fmt::Display>,
        own_keys: &[&str],
        other_keys: &str,
    ) -> ParseError {
        let limit_keys = LimitKind::ALL.map(LimitKind::key);
        let keys: Vec<&str> = own_keys.iter().copied().chain(limit_keys).collect();
        let why = format!(
            "unknown key \"{}\"; the accepted keys are {}{other_keys}",
            key.get_ref(),
            keys.join(", ")
        );
        self.error(key.span(), why)
    }

    fn parse_bool(&self, key: &str, value: &Spanned<DeValue<'_>>) -> Result<bool, ParseError> {
        match value.get_ref() {
            DeValue::Boolean(value) => Ok(*value),
            _ => Err(self.error(value.span(), format!("{key}: expected true or false"))),
        }
    }

    fn parse_names(
        &self,
        key: &str,
        value: &Spanned<DeValue<'_>>,
    ) -> Result<BTreeSet<String>, ParseError> {
        let expected = || format!("{key}: expected a list of user names such as [\"alice\"]");
        let DeValue::Array(entries) = value.get_ref() else {
            return Err(self.error(value.span(), expected()));
        };
        self.check_entry_count(key, entries.len(), value.span())?;
        let mut names = BTreeSet::new();
        for entry in entries.iter() {
            let DeValue::String(name) = entry.get_ref() else {
                return Err(self.error(entry.span(), expected()));
            };
            self.check_name(key, name, entry.span())?;
            names.insert(name.to_string());
        }
        Ok(names)
    }

    /// Parses the tables of all users or groups.
    fn parse_overrides(
        &self,
        key: &str,
        value: &Spanned<DeValue<'_>>,
    ) -> Result<BTreeMap<String, PartialLimits>, ParseError> {
        let expected = || format!("{key}: expected tables such as [{key}.NAME]");
        let DeValue::Table(tables) = value.get_ref() else {
            return Err(self.error(value.span(), expected()));
        };
        self.check_entry_count(key, tables.len(), value.span())?;
        let mut overrides = BTreeMap::new();
        for (name, table) in tables {
            self.check_name(key, name.get_ref(), name.span())?;
            let DeValue::Table(table) = table.get_ref() else {
                return Err(self.error(name.span(), expected()));
            };
            let mut limits = PartialLimits::default();
            for (key, value) in table {
                let kind = LimitKind::from_key(key.get_ref());
                let kind = kind.ok_or_else(|| self.unknown_key(key, &[], ""))?;
                self.parse_limit(kind, value, &mut limits)?;
            }
            overrides.insert(name.get_ref().to_string(), limits);
        }
        Ok(overrides)
    }

    fn parse_limit(
        &self,
        kind: LimitKind,
        value: &Spanned<DeValue<'_>>,
        limits: &mut PartialLimits,
    ) -> Result<(), ParseError> {
        let limit = match value.get_ref() {
            // An integer without digits of the radix 10 has a value out of any range.
            DeValue::Integer(integer) => {
                let number = u64::from_str_radix(integer.as_str(), integer.radix());
                kind.check(number.unwrap_or(u64::MAX))
            }
            // Numbers in quotes are accepted for units only.
            DeValue::String(text) if kind.range().is_bytes || text.parse::<u64>().is_err() => {
                kind.parse_limit(text)
            }
            _ => kind.check(u64::MAX),
        };
        let limit = limit
            .map_err(|expected| self.error(value.span(), format!("{}: {expected}", kind.key())))?;
        limits.set(kind, limit);
        Ok(())
    }

    fn check_name(&self, key: &str, name: &str, span: Range<usize>) -> Result<(), ParseError> {
        let is_printable = |c: char| !c.is_whitespace() && !c.is_control() && c != ':';
        let is_name =
            !name.is_empty() && name.len() <= NAME_BYTES_MAX && name.chars().all(is_printable);
        match is_name {
            true => Ok(()),
            false => Err(self.error(
                span,
                format!(
                    "{key}: expected a name of 1 to {NAME_BYTES_MAX} bytes without spaces and \
                     colons, and not {name:?}"
                ),
            )),
        }
    }

    fn check_entry_count(
        &self,
        key: &str,
        count: usize,
        span: Range<usize>,
    ) -> Result<(), ParseError> {
        match count > ENTRIES_MAX {
            false => Ok(()),
            true => Err(self.error(
                span,
                format!("{key} has {count} entries; at most {ENTRIES_MAX} are accepted"),
            )),
        }
    }
}
