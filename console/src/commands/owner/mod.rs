//! `owner`: records the override of this machine's owner, which applies to all virtual machines on
//! the machine, publishes the owner's policy, and shows who uses the machine.
//!
//! The command needs neither a virtual machine nor rights in one. Overrides and policies are files
//! that only this user can write, so load watchers trust these files. Load watchers answer status
//! queries of any user.

mod confirmation;
mod machine_picture;
mod status;

use self::confirmation::Confirmation;
use self::status::status_outcome;
use crate::arguments::parse_duration;
use crate::clock::unix_micros;
use crate::command::{CommandSpec, LocalCommand, LocalContext, ParsedCommand};
use crate::outcome::Outcome;
use crate::output::time::format_local_time;
use crate::parse_error::ParseError;
use pvm_load_watcher::hours::WeeklyHours;
use pvm_load_watcher::owner_override::{
    self, DeclaredPresence, Drain, OVERRIDE_DURATION_DEFAULT, OVERRIDE_DURATION_MAX,
    OVERRIDES_DIR_VAR, OwnerOverride, Presence, overrides_dir,
};
use pvm_load_watcher::policy::{POLICY_BYTES_MAX, Policy, PolicyError};
use pvm_load_watcher::published_policy::{self, PublishedPolicyError};
use pvm_load_watcher::user_files::{FileContent, FileVersion};
use sempa_proto::Micros;
use serde_json::json;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub(crate) const SPEC: CommandSpec = CommandSpec {
    name: "owner",
    summary: "Set what guests may do on your machine, and show who uses it",
    detail: "Syntax:  owner [ status ]\n         \
             owner away | here [ --for time ]\n         \
             owner auto\n         \
             owner never hours [ and hours ... ] | none\n         \
             owner limit number [ cores ] | none\n         \
             owner end [ none ]\n         \
             owner policy [ file | none ]\n\
             Run it on your machine; it needs no virtual machine of yours.\n\
             status  who uses this machine, since when, and why they may or may not\n\
             away    you do not need it: guests are welcome although you are logged in\n\
             here    you need it: guests stop and leave\n        \
             both end with --for (such as 30m, 2h, 1d), else with the next login or logout, or after 12 hours\n\
             auto    detect your presence by logins and other signs again\n\
             never   no guests at these times, such as 9-17, mon-fri 9-17:30, fri 22-6, sat,sun, always; they are in\n        \
             the time zone of this machine, whatever your TZ is: the answer names it\n\
             limit   at most this number of their tasks, on as many processors\n\
             end     guests that must stop are ended at once; use it for those that cannot leave\n\
             policy  use the rules in a file, such as docs/owner.toml; without a file, show them\n\
             Your own virtual machines also read ~/.config/sempa/owner.toml.\n",
    parse: |args| parse(args).map(ParsedCommand::local_command),
    ..CommandSpec::DEFAULT
};

/// A parsed `owner` command.
#[derive(Clone, Debug, PartialEq, Eq)]
enum OwnerCommand {
    /// Declares the owner present or absent, for `duration`. Without a duration, the declaration
    /// ends with the next login or logout, at the latest after [`OVERRIDE_DURATION_DEFAULT`].
    DeclarePresence {
        state: Presence,
        duration: Option<Duration>,
    },
    /// Removes the declared presence, so that load watchers detect the owner's presence again.
    DetectPresence,
    /// Admits no guests at these times. An empty list removes the rule.
    ClosedHours(Vec<WeeklyHours>),
    /// Limits the number of guest tasks; `None` removes the limit.
    TaskLimit(Option<u32>),
    /// States whether guests that must stop are ended at once.
    EndGuests(bool),
    /// Shows, publishes or withdraws the owner's policy.
    Policy(PolicyAction),
    /// Shows who uses this machine, since when, and what guests may do.
    Status,
}

/// Action on the owner's published policy.
#[derive(Clone, Debug, PartialEq, Eq)]
enum PolicyAction {
    Show,
    /// Makes the contained file the policy in force, by copying the file.
    Publish(PathBuf),
    Withdraw,
}

fn wrong_type_error(word: &str, expected_type: &'static str) -> ParseError {
    ParseError::WrongType {
        command: "owner",
        word: word.to_string(),
        expected: expected_type,
    }
}

/// Parses the words after `owner`.
fn parse(args: &[String]) -> Result<OwnerCommand, ParseError> {
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let presence_of = |word: &str| {
        if word == "here" {
            Presence::Here
        } else {
            Presence::Away
        }
    };
    let bounded_duration = |text: &str| {
        parse_duration(text)
            .filter(|duration| *duration <= OVERRIDE_DURATION_MAX)
            .map(Some)
            .ok_or_else(|| wrong_type_error(text, "a time such as 2h or 30m, up to 7d"))
    };
    match words[..] {
        [] | ["status"] => Ok(OwnerCommand::Status),
        ["auto"] => Ok(OwnerCommand::DetectPresence),
        [word @ ("here" | "away")] => Ok(OwnerCommand::DeclarePresence {
            state: presence_of(word),
            duration: None,
        }),
        [word @ ("here" | "away"), "--for", text] => Ok(OwnerCommand::DeclarePresence {
            state: presence_of(word),
            duration: bounded_duration(text)?,
        }),
        [word @ ("here" | "away"), option] if option.starts_with("--for=") => {
            Ok(OwnerCommand::DeclarePresence {
                state: presence_of(word),
                duration: bounded_duration(option.trim_start_matches("--for="))?,
            })
        }
        ["never", "none"] => Ok(OwnerCommand::ClosedHours(Vec::new())),
        ["never", _, ..] => {
            let hour_texts = words[1..]
                .split(|word| *word == "and")
                .map(|part| part.join(" "));
            let parse_hours = |part: String| {
                part.parse().map_err(|_| {
                    wrong_type_error(
                        &part,
                        "a time of the week such as 9-17, 'mon-fri 9-17:30' or always",
                    )
                })
            };
            hour_texts
                .map(parse_hours)
                .collect::<Result<_, _>>()
                .map(OwnerCommand::ClosedHours)
        }
        ["limit", "none"] => Ok(OwnerCommand::TaskLimit(None)),
        ["limit", core_count] | ["limit", core_count, "core" | "cores"] => core_count
            .parse()
            .map(|core_count| OwnerCommand::TaskLimit(Some(core_count)))
            .map_err(|_| wrong_type_error(core_count, "a number of cores")),
        ["end"] => Ok(OwnerCommand::EndGuests(true)),
        ["end", "none"] => Ok(OwnerCommand::EndGuests(false)),
        ["policy"] => Ok(OwnerCommand::Policy(PolicyAction::Show)),
        ["policy", "none"] => Ok(OwnerCommand::Policy(PolicyAction::Withdraw)),
        ["policy", file] => Ok(OwnerCommand::Policy(PolicyAction::Publish(file.into()))),
        _ => Err(ParseError::WrongArgs("owner")),
    }
}

/// Returns the override `old_override` with the change that the command makes at time `now`.
fn apply_command(
    old_override: OwnerOverride,
    command: &OwnerCommand,
    now: Micros,
) -> OwnerOverride {
    let mut new_override = old_override;
    match command {
        OwnerCommand::DeclarePresence { state, duration } => {
            let expiry_time =
                now + Micros::from_secs(duration.unwrap_or(OVERRIDE_DURATION_DEFAULT).as_secs());
            new_override.presence = Some(DeclaredPresence {
                state: *state,
                declared_at: now,
                expires_at: expiry_time,
                ends_with_visit: duration.is_none(),
            });
        }
        OwnerCommand::DetectPresence => new_override.presence = None,
        OwnerCommand::ClosedHours(hours) => {
            new_override.policy.forbidden_hours = (!hours.is_empty()).then(|| hours.clone())
        }
        OwnerCommand::TaskLimit(cores) => new_override.policy.cores = *cores,
        OwnerCommand::EndGuests(ends_guests) => new_override.set_ends_guests(*ends_guests),
        OwnerCommand::Policy(_) | OwnerCommand::Status => {}
    }
    new_override
}

/// Describes the override in one line.
fn describe_override(user_override: &OwnerOverride) -> String {
    let mut parts = Vec::new();
    if let Some(DeclaredPresence {
        state,
        expires_at: expiry_time,
        ends_with_visit,
        ..
    }) = user_override.presence
    {
        let state = if state == Presence::Here {
            "here"
        } else {
            "away"
        };
        let visit_clause = if ends_with_visit {
            ", or until the next login or logout"
        } else {
            ""
        };
        parts.push(format!(
            "{state} until {}{visit_clause}",
            format_local_time(expiry_time)
        ));
    }
    if let Some(hours) = &user_override.policy.forbidden_hours {
        let hour_texts: Vec<String> = hours.iter().map(|hours| hours.to_string()).collect();
        parts.push(format!("no guests {}", hour_texts.join(" and ")));
    }
    parts.extend(
        user_override
            .policy
            .cores
            .map(|cores| format!("at most {cores} of their tasks")),
    );
    if user_override.ends_guests() {
        parts.push("guests that must stop are ended".into());
    }
    parts.extend(user_override.drain.as_ref().map(Drain::sentence));
    if parts.is_empty() {
        "none; your presence is detected".into()
    } else {
        parts.join("; ")
    }
}

fn override_json(user_override: &OwnerOverride) -> serde_json::Value {
    let state = user_override.presence.map(|presence| {
        if presence.state == Presence::Here {
            "here"
        } else {
            "away"
        }
    });
    let closed_hours: Vec<String> = user_override
        .policy
        .forbidden_hours
        .iter()
        .flatten()
        .map(|hours| hours.to_string())
        .collect();
    let expiry_us = user_override.presence.map(|presence| presence.expires_at.0);
    let ends_with_visit = user_override
        .presence
        .is_some_and(|presence| presence.ends_with_visit);
    json!({ "said": state, "until_us": expiry_us, "until_visit": ends_with_visit, "never": closed_hours, "cores": user_override.policy.cores, "end": user_override.ends_guests() })
}

impl LocalCommand for OwnerCommand {
    /// Executes the command for the user who runs the console.
    fn run(&self, _context: &LocalContext) -> Outcome {
        let dir = overrides_dir(std::env::var_os(OVERRIDES_DIR_VAR).map(Into::into));
        let uid = nix::unistd::geteuid().as_raw();
        let confirm = |content, version| Confirmation::wait(uid, content, version);
        match self {
            Self::Status => status_outcome(&dir, uid),
            Self::Policy(action) => run_policy(&dir, uid, action, confirm),
            _ => write_override(&dir, uid, self, confirm),
        }
    }
}

/// Reason why the policy in a file is not published. The published policy is unchanged.
#[derive(Debug, thiserror::Error)]
enum PolicyFileError {
    #[error("owner: {name} cannot be read: {source}; nothing has changed")]
    Unreadable {
        /// Path of the file.
        name: String,
        source: std::io::Error,
    },
    #[error("owner: {0}; nothing has changed")]
    Invalid(#[from] PolicyError),
}

/// Returns the text of a policy file, if the policy is valid.
fn read_policy(file: &Path) -> Result<String, PolicyFileError> {
    let name = file.display().to_string();
    let mut text = String::new();
    let read_result = File::open(file).and_then(|file| {
        file.take(POLICY_BYTES_MAX as u64 + 1)
            .read_to_string(&mut text)
    });
    if let Err(source) = read_result {
        return Err(PolicyFileError::Unreadable { name, source });
    }
    Policy::parse_without_owners(&name, &text)?;
    Ok(text)
}

/// Shows, publishes or withdraws the policy. `confirm` returns which load watchers have read a
/// version of a file.
fn run_policy(
    dir: &Path,
    uid: u32,
    action: &PolicyAction,
    confirm: impl Fn(FileContent, Option<FileVersion>) -> Confirmation,
) -> Outcome {
    let path = published_policy::policy_file(dir, uid);
    let path_text = path.display();
    let text = match action {
        PolicyAction::Show => match published_policy::read(dir, uid) {
            Ok(policy) => policy.map(|(text, _)| text),
            Err(PublishedPolicyError::Untrusted(reason)) => {
                return Outcome::from_refusal(format!("owner: {reason}"));
            }
            Err(PublishedPolicyError::Malformed(error)) => {
                return Outcome::from_refusal(format!(
                    "owner: {error}; load watchers keep the previous policy, and admit no guests if there was none"
                ));
            }
        },
        PolicyAction::Publish(file) => match read_policy(file) {
            Ok(text) => Some(text),
            Err(reason) => return Outcome::from_refusal(reason),
        },
        PolicyAction::Withdraw => None,
    };
    let no_policy_text = "you have no policy here; 'owner policy FILE' publishes one\n";
    if *action == PolicyAction::Show {
        let json = json!({ "policy": text, "file": path });
        let output_text = text.unwrap_or_else(|| no_policy_text.into());
        return Outcome::with_json(output_text, json, false);
    }
    let written_file = match published_policy::write(dir, uid, text.as_deref()) {
        Ok(written_file) => written_file,
        Err(error) => {
            let advice = format!(
                "nothing has changed; check the file, or set another folder with {OVERRIDES_DIR_VAR}"
            );
            return Outcome::from_refusal(format!(
                "owner: {path_text} cannot be written: {error}; {advice}"
            ));
        }
    };
    let path = written_file.as_ref().map_or(path, |(_, path)| path.clone());
    let version = written_file.map(|(version, _)| version);
    let confirmation = confirm(FileContent::Policy, version);
    let output_text = match &text {
        Some(text) if confirmation.is_complete() => {
            format!("your policy is in force ({}):\n{text}", path.display())
        }
        Some(text) => format!("your policy is written ({}):\n{text}", path.display()),
        None => no_policy_text.into(),
    };
    let json = json!({ "policy": text, "file": path });
    confirmation.outcome(output_text, json)
}

/// Writes the override that the command describes. `confirm` returns which load watchers have read
/// a version of a file.
fn write_override(
    dir: &Path,
    uid: u32,
    command: &OwnerCommand,
    confirm: impl Fn(FileContent, Option<FileVersion>) -> Confirmation,
) -> Outcome {
    // A file that cannot be trusted counts as empty and is replaced.
    let new_override = apply_command(
        owner_override::read(dir, uid).unwrap_or_default(),
        command,
        unix_micros(),
    );
    match owner_override::write(dir, uid, &new_override) {
        Ok(written_file) => {
            let version = written_file.map(|(version, _)| version);
            let confirmation = confirm(FileContent::Override, version);
            let mut text = format!("your directives: {}\n", describe_override(&new_override));
            let mut json = override_json(&new_override);
            if new_override.policy.forbidden_hours.is_some() {
                let clock = confirmation.clock();
                text.push_str("these hours are in the time zone of this machine");
                text.extend(clock.iter().map(|clock| format!("; it is {clock} now")));
                text.push('\n');
                json["clock"] = json!(clock);
            }
            confirmation.outcome(text, json)
        }
        Err(error) => {
            let path = owner_override::override_file(dir, uid);
            let advice = format!(
                "nothing has changed; check the file, or set {OVERRIDES_DIR_VAR} for you and the load watchers"
            );
            Outcome::from_refusal(format!(
                "owner: {} cannot be written: {error}; {advice}",
                path.display()
            ))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_line(line: &str) -> Result<OwnerCommand, ParseError> {
        parse(
            &line
                .split_whitespace()
                .map(str::to_string)
                .collect::<Vec<_>>(),
        )
    }

    #[test]
    fn owner_arguments_parse() {
        let declare_command = |state, seconds: Option<u64>| {
            Ok(OwnerCommand::DeclarePresence {
                state,
                duration: seconds.map(Duration::from_secs),
            })
        };
        assert_eq!(parse_line(""), Ok(OwnerCommand::Status));
        assert_eq!(parse_line("status"), Ok(OwnerCommand::Status));
        assert_eq!(parse_line("away"), declare_command(Presence::Away, None));
        assert_eq!(
            parse_line("here --for 2h"),
            declare_command(Presence::Here, Some(7200))
        );
        assert_eq!(
            parse_line("away --for=30m"),
            declare_command(Presence::Away, Some(1800))
        );
        assert_eq!(parse_line("auto"), Ok(OwnerCommand::DetectPresence));
        let hours = |text: &str| text.parse::<WeeklyHours>().expect("good");
        assert_eq!(
            parse_line("never 9-17"),
            Ok(OwnerCommand::ClosedHours(vec![hours("9-17")]))
        );
        assert_eq!(
            parse_line("never mon-fri 9-17 and sat"),
            Ok(OwnerCommand::ClosedHours(vec![
                hours("mon-fri 9-17"),
                hours("sat")
            ]))
        );
        assert_eq!(
            parse_line("never none"),
            Ok(OwnerCommand::ClosedHours(Vec::new()))
        );
        assert_eq!(
            parse_line("limit 2 cores"),
            Ok(OwnerCommand::TaskLimit(Some(2)))
        );
        assert_eq!(parse_line("limit 1"), Ok(OwnerCommand::TaskLimit(Some(1))));
        assert_eq!(parse_line("limit none"), Ok(OwnerCommand::TaskLimit(None)));
        assert_eq!(parse_line("end"), Ok(OwnerCommand::EndGuests(true)));
        assert_eq!(parse_line("end none"), Ok(OwnerCommand::EndGuests(false)));
        assert_eq!(
            parse_line("policy"),
            Ok(OwnerCommand::Policy(PolicyAction::Show))
        );
        assert_eq!(
            parse_line("policy none"),
            Ok(OwnerCommand::Policy(PolicyAction::Withdraw))
        );
        assert_eq!(
            parse_line("policy ./mine.toml"),
            Ok(OwnerCommand::Policy(PolicyAction::Publish(
                "./mine.toml".into()
            )))
        );
    }

    #[test]
    fn errors_name_the_wrong_word() {
        for (line, expected_text) in [
            ("never", "owner: wrong #args"),
            ("gone", "owner: wrong #args"),
            ("here now", "owner: wrong #args"),
            ("policy a b", "owner: wrong #args"),
            ("never noon", "owner: noon is not a time of the week"),
            ("limit two cores", "owner: two is not a number of cores"),
            ("away --for 2", "owner: 2 is not a time such as"),
            ("away --for 8d", "owner: 8d is not a time such as"),
            ("away --for 0h", "owner: 0h is not a time such as"),
        ] {
            let error = parse_line(line).expect_err(line).to_string();
            assert!(error.starts_with(expected_text), "{line}: {error}");
        }
    }

    /// No load watcher runs.
    fn confirm_by_none(_: FileContent, _: Option<FileVersion>) -> Confirmation {
        Confirmation::default()
    }

    fn confirmed_by(name: &str) -> Confirmation {
        Confirmation {
            confirmed: vec![name.into()],
            ..Confirmation::default()
        }
    }

    /// The parts of an override accumulate and can be removed one by one. An empty override leaves
    /// no file.
    #[test]
    fn directives_accumulate_and_can_be_removed() {
        let dir = tempfile::tempdir().expect("a folder");
        let uid = nix::unistd::geteuid().as_raw();
        let apply_line = |line: &str| {
            let command = parse_line(line).expect(line);
            write_override(dir.path(), uid, &command, confirm_by_none).text
        };
        assert!(
            apply_line("never mon-fri 9-17")
                .starts_with("your directives: no guests mon-fri 9:00-17:00")
        );
        assert!(
            apply_line("limit 2 cores")
                .contains("no guests mon-fri 9:00-17:00; at most 2 of their tasks")
        );
        let here_text = apply_line("here");
        assert!(
            here_text.contains("or until the next login or logout")
                && here_text.contains("at most 2"),
            "{here_text}"
        );
        assert!(!apply_line("here --for 1h").contains("logout"));
        assert!(!apply_line("auto").contains("here"));
        let end_text = apply_line("end");
        assert!(end_text.contains("at most 2") && end_text.contains("must stop are ended"));
        assert!(end_text.contains("in the time zone of this machine"));
        assert!(!apply_line("end none").contains("are ended"));
        assert!(!apply_line("never none").contains("time zone"));
        assert_eq!(
            apply_line("limit none"),
            "your directives: none; your presence is detected\n"
        );
        assert_eq!(std::fs::read_dir(dir.path()).expect("a folder").count(), 0);
    }

    /// A policy can be published, shown and withdrawn. An invalid policy file changes nothing.
    #[test]
    fn invalid_policy_changes_nothing() {
        let dir = tempfile::tempdir().expect("a folder");
        let uid = nix::unistd::geteuid().as_raw();
        let (file, show_policy) = (dir.path().join("mine.toml"), || {
            run_policy(dir.path(), uid, &PolicyAction::Show, confirm_by_none).text
        });
        let publish = |text: &str| {
            std::fs::write(&file, text).expect("the test's own file");
            run_policy(
                dir.path(),
                uid,
                &PolicyAction::Publish(file.clone()),
                |_, _| confirmed_by("virtual machine pvm of alice"),
            )
        };
        assert!(show_policy().starts_with("you have no policy here"));
        let outcome = publish("leave_after = 30\n");
        assert!(
            !outcome.failed
                && outcome.text.starts_with("your policy is in force (")
                && outcome.text.contains("leave_after = 30")
        );
        let syntax_refusal = publish("nice = 3\n\nnice = 4\n").refusal.expect("refused");
        assert!(
            syntax_refusal.contains("mine.toml, line 3: duplicate key")
                && syntax_refusal.ends_with("; nothing has changed"),
            "{syntax_refusal}"
        );
        let size_refusal = publish(&"#".repeat(POLICY_BYTES_MAX + 1))
            .refusal
            .expect("refused");
        assert!(size_refusal.contains("longer than"), "{size_refusal}");
        assert_eq!(show_policy(), "leave_after = 30\n");
        assert!(
            run_policy(
                dir.path(),
                uid,
                &PolicyAction::Publish("/nowhere/x".into()),
                confirm_by_none
            )
            .refusal
            .is_some()
        );
        run_policy(dir.path(), uid, &PolicyAction::Withdraw, confirm_by_none);
        assert!(show_policy().starts_with("you have no policy here"));
    }

    /// If the override cannot be written, the refusal is one line.
    #[test]
    fn write_error_is_one_line() {
        let outcome = write_override(
            Path::new("/nowhere"),
            7,
            &OwnerCommand::TaskLimit(Some(1)),
            confirm_by_none,
        );
        let line = outcome.refusal.expect("refused");
        assert!(
            outcome.failed
                && line.contains("/nowhere/sempa-owner-7.toml")
                && line.lines().count() == 1,
            "{line}"
        );
    }
}
