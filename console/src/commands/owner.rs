//! `owner`: records the directives of this machine's owner for all virtual machines on it, and
//! shows who uses it.
//!
//! The command needs neither a virtual machine nor rights in one. Directives are files that only
//! this user can write, so load watchers trust them. Load watchers answer status queries of any
//! user.

use crate::arguments::parse_duration;
use crate::clock::unix_micros;
use crate::command::{CommandSpec, LocalCommand, LocalContext, ParsedCommand};
use crate::outcome::Outcome;
use crate::parse_error::ParseError;
use pvm_load_watcher::hours::Hours;
use pvm_load_watcher::owner::format_utc_time;
use pvm_load_watcher::owner_override::{
    self, DEFAULT_DURATION, DURATION_MAX, DeclaredPresence, OVERRIDES_DIR_VAR, OwnerOverride,
    Presence, overrides_dir,
};
use pvm_load_watcher::policy::{POLICY_BYTES_MAX, Policy};
use pvm_load_watcher::published_policy::{self, PolicyRejection};
use pvm_load_watcher::status::{GuestStatus, Status, query_all};
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
             owner policy [ file | none ]\n\
             Run it on your machine; it needs no virtual machine of yours.\n\
             status  who uses this machine, since when, and why they may or may not\n\
             away    you do not need it: guests are welcome although you are logged in\n\
             here    you need it: guests stop and leave\n        \
             both end with --for (such as 30m, 2h, 1d), else with the next login or logout, or after 12 hours\n\
             auto    detect your presence by logins and other signs again\n\
             never   no guests at these times, such as 9-17, mon-fri 9-17:30, fri 22-6, sat,sun, always\n\
             limit   at most this number of their tasks, on as many processors\n\
             policy  use the rules in a file, such as docs/owner.toml; without a file, show them\n\
             Your own virtual machines also read ~/.config/sempa/owner.toml.\n",
    parse: |args| parse(args).map(ParsedCommand::local),
    ..CommandSpec::DEFAULT
};

/// A parsed `owner` command.
#[derive(Clone, Debug, PartialEq, Eq)]
enum OwnerCommand {
    /// Declares the owner present or absent, for a given time, or until the next login or logout.
    DeclarePresence {
        state: Presence,
        duration: Option<Duration>,
    },
    /// Removes the declared presence. Load watchers detect the owner's presence again.
    DetectPresence,
    /// Admits no guests at these times. An empty list removes the rule.
    ClosedHours(Vec<Hours>),
    /// Limits the number of guest tasks; `None` removes the limit.
    TaskLimit(Option<u32>),
    /// Shows, publishes or withdraws a policy file.
    Policy(PolicyAction),
    /// Shows who uses this machine, since when, and why.
    Status,
}

/// Action on the owner's policy.
#[derive(Clone, Debug, PartialEq, Eq)]
enum PolicyAction {
    Show,
    /// Copies this file as the policy in force.
    Publish(PathBuf),
    Withdraw,
}

fn wrong_type(word: &str, wanted: &'static str) -> ParseError {
    ParseError::WrongType {
        command: "owner",
        word: word.to_string(),
        expected: wanted,
    }
}

/// Parses the words after the command.
fn parse(args: &[String]) -> Result<OwnerCommand, ParseError> {
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let state = |word: &str| {
        if word == "here" {
            Presence::Here
        } else {
            Presence::Away
        }
    };
    let bounded_duration = |text: &str| {
        parse_duration(text)
            .filter(|span| *span <= DURATION_MAX)
            .map(Some)
            .ok_or_else(|| wrong_type(text, "a time such as 2h or 30m, up to 7d"))
    };
    match words[..] {
        [] | ["status"] => Ok(OwnerCommand::Status),
        ["auto"] => Ok(OwnerCommand::DetectPresence),
        [word @ ("here" | "away")] => Ok(OwnerCommand::DeclarePresence {
            state: state(word),
            duration: None,
        }),
        [word @ ("here" | "away"), "--for", text] => Ok(OwnerCommand::DeclarePresence {
            state: state(word),
            duration: bounded_duration(text)?,
        }),
        [word @ ("here" | "away"), option] if option.starts_with("--for=") => {
            Ok(OwnerCommand::DeclarePresence {
                state: state(word),
                duration: bounded_duration(option.trim_start_matches("--for="))?,
            })
        }
        ["never", "none"] => Ok(OwnerCommand::ClosedHours(Vec::new())),
        ["never", _, ..] => {
            let parts = words[1..]
                .split(|word| *word == "and")
                .map(|part| part.join(" "));
            let hours = |part: String| {
                part.parse().map_err(|_| {
                    wrong_type(
                        &part,
                        "a time of the week such as 9-17, 'mon-fri 9-17:30' or always",
                    )
                })
            };
            parts
                .map(hours)
                .collect::<Result<_, _>>()
                .map(OwnerCommand::ClosedHours)
        }
        ["limit", "none"] => Ok(OwnerCommand::TaskLimit(None)),
        ["limit", number] | ["limit", number, "core" | "cores"] => number
            .parse()
            .map(|number| OwnerCommand::TaskLimit(Some(number)))
            .map_err(|_| wrong_type(number, "a number of cores")),
        ["policy"] => Ok(OwnerCommand::Policy(PolicyAction::Show)),
        ["policy", "none"] => Ok(OwnerCommand::Policy(PolicyAction::Withdraw)),
        ["policy", file] => Ok(OwnerCommand::Policy(PolicyAction::Publish(file.into()))),
        _ => Err(ParseError::WrongArgs("owner")),
    }
}

/// Returns the directives `current` as changed by the command at time `now`.
fn apply_command(current: OwnerOverride, command: &OwnerCommand, now: Micros) -> OwnerOverride {
    let OwnerOverride {
        presence: mut said,
        mut policy,
    } = current;
    match command {
        OwnerCommand::DeclarePresence { state, duration } => {
            let until = now + Micros::from_secs(duration.unwrap_or(DEFAULT_DURATION).as_secs());
            said = Some(DeclaredPresence {
                state: *state,
                at: now,
                until,
                ends_with_visit: duration.is_none(),
            });
        }
        OwnerCommand::DetectPresence => said = None,
        OwnerCommand::ClosedHours(hours) => {
            policy.never = (!hours.is_empty()).then(|| hours.clone())
        }
        OwnerCommand::TaskLimit(cores) => policy.cores = *cores,
        OwnerCommand::Policy(_) | OwnerCommand::Status => {}
    }
    OwnerOverride {
        presence: said,
        policy,
    }
}

/// Describes the owner's directives in one line.
fn describe_override(directives: &OwnerOverride) -> String {
    let mut parts = Vec::new();
    if let Some(DeclaredPresence {
        state,
        until,
        ends_with_visit: visit,
        ..
    }) = directives.presence
    {
        let state = if state == Presence::Here {
            "here"
        } else {
            "away"
        };
        let visit = if visit {
            ", or until the next login or logout"
        } else {
            ""
        };
        parts.push(format!("{state} until {}{visit}", format_utc_time(until)));
    }
    if let Some(hours) = &directives.policy.never {
        let all: Vec<String> = hours.iter().map(|hours| hours.to_string()).collect();
        parts.push(format!("no guests {}", all.join(" and ")));
    }
    parts.extend(
        directives
            .policy
            .cores
            .map(|cores| format!("at most {cores} of their tasks")),
    );
    if parts.is_empty() {
        "none; your presence is detected".into()
    } else {
        parts.join("; ")
    }
}

fn override_json(directives: &OwnerOverride) -> serde_json::Value {
    let state = directives.presence.map(|said| {
        if said.state == Presence::Here {
            "here"
        } else {
            "away"
        }
    });
    let never: Vec<String> = directives
        .policy
        .never
        .iter()
        .flatten()
        .map(|hours| hours.to_string())
        .collect();
    let until = directives.presence.map(|said| said.until.0);
    let visit = directives.presence.is_some_and(|said| said.ends_with_visit);
    json!({ "said": state, "until_us": until, "until_visit": visit, "never": never, "cores": directives.policy.cores })
}

impl LocalCommand for OwnerCommand {
    /// Executes the command for the user who runs the console.
    fn run(&self, _context: &LocalContext) -> Outcome {
        let dir = overrides_dir(std::env::var_os(OVERRIDES_DIR_VAR).map(Into::into));
        let uid = nix::unistd::geteuid().as_raw();
        match self {
            OwnerCommand::Status => status(&dir, uid),
            OwnerCommand::Policy(action) => run_policy(&dir, uid, action),
            _ => write_override(&dir, uid, self),
        }
    }
}

/// Reads and validates a policy file before it is published.
fn read_policy(file: &Path) -> Result<String, String> {
    let name = file.display().to_string();
    let mut text = String::new();
    let read = File::open(file).and_then(|file| {
        file.take(POLICY_BYTES_MAX as u64 + 1)
            .read_to_string(&mut text)
    });
    read.map_err(|error| format!("owner: {name} cannot be read: {error}; nothing has changed"))?;
    match Policy::parse_own(&name, &text) {
        Ok(_) => Ok(text),
        Err(error) => Err(format!("owner: {error}; nothing has changed")),
    }
}

fn run_policy(dir: &Path, uid: u32, action: &PolicyAction) -> Outcome {
    let path = published_policy::policy_file(dir, uid);
    let place = path.display();
    let text = match action {
        PolicyAction::Show => match published_policy::read(dir, uid) {
            Ok(read) => read.map(|(text, _)| text),
            Err(PolicyRejection::Untrusted(sentence)) => {
                return Outcome::refused(format!("owner: {sentence}"));
            }
            Err(PolicyRejection::Malformed(error)) => {
                return Outcome::refused(format!(
                    "owner: {error}; load watchers keep the previous policy, and admit no guests if there was none"
                ));
            }
        },
        PolicyAction::Publish(file) => match read_policy(file) {
            Ok(text) => Some(text),
            Err(sentence) => return Outcome::refused(sentence),
        },
        PolicyAction::Withdraw => None,
    };
    let changes = *action != PolicyAction::Show;
    if changes && let Err(error) = published_policy::write(dir, uid, text.as_deref()) {
        let advice = format!(
            "nothing has changed; check the file, or set another folder with {OVERRIDES_DIR_VAR}"
        );
        return Outcome::refused(format!(
            "owner: {place} cannot be written: {error}; {advice}"
        ));
    }
    let json = json!({ "policy": text, "file": path });
    let text_out = match text {
        Some(text) if changes => format!("your policy is in force ({place}):\n{text}"),
        Some(text) => text,
        None => "you have no policy here; 'owner policy FILE' publishes one\n".into(),
    };
    Outcome::with_values(text_out, json, false)
}

fn write_override(dir: &Path, uid: u32, command: &OwnerCommand) -> Outcome {
    // A file that cannot be trusted counts as empty and is replaced.
    let updated = apply_command(
        owner_override::read(dir, uid).unwrap_or_default(),
        command,
        unix_micros(),
    );
    match owner_override::write(dir, uid, &updated) {
        Ok(()) => Outcome::with_values(
            format!("your directives: {}\n", describe_override(&updated)),
            override_json(&updated),
            false,
        ),
        Err(error) => {
            let path = owner_override::override_file(dir, uid);
            let advice = format!(
                "nothing has changed; check the file, or set {OVERRIDES_DIR_VAR} for you and the load watchers"
            );
            Outcome::refused(format!(
                "owner: {} cannot be written: {error}; {advice}",
                path.display()
            ))
        }
    }
}

fn status(dir: &Path, uid: u32) -> Outcome {
    let (all, unanswered) = match query_all() {
        Ok(answers) => answers,
        Err(error) => {
            return Outcome::refused(format!("owner: load watchers cannot be found: {error}"));
        }
    };
    let (said, wrong) = match owner_override::read(dir, uid) {
        Ok(word) => (word, None),
        Err(sentence) => (OwnerOverride::default(), Some(sentence)),
    };
    let mut text = String::new();
    if !said.is_empty() {
        text.push_str(&format!("your directives: {}\n", describe_override(&said)));
    }
    all.iter()
        .for_each(|status| text.push_str(&status_text(status)));
    if all.is_empty() && unanswered.is_empty() {
        text.push_str("no virtual machine with a load watcher uses this machine\n");
    }
    let failed = !unanswered.is_empty();
    let complaints = unanswered
        .into_iter()
        .chain(wrong)
        .map(|line| format!("owner: {line}"))
        .collect();
    let json = json!({ "you": override_json(&said), "virtual_machines": all });
    Outcome {
        errors: complaints,
        ..Outcome::with_values(text, json, failed)
    }
}

/// Formats the report of one load watcher.
fn status_text(status: &Status) -> String {
    let Status {
        vm,
        user,
        host,
        owner,
        confidence,
        why,
        ..
    } = status;
    let mut out = format!("virtual machine {vm} of {user} ({host})\n");
    out.push_str(&format!(
        "  owner     {owner}, {confidence} % sure: {why}\n"
    ));
    out.push_str(&guests_text(status));
    let line = |GuestStatus {
                    tid,
                    program,
                    pid,
                    user,
                    since_us,
                    cpu_s,
                }: &GuestStatus| {
        let since = if *since_us == 0 {
            "?".into()
        } else {
            format_utc_time(Micros(*since_us))
        };
        format!(
            "  task      {tid} {program} of {user}, process {pid}, since {since}, {cpu_s:.1} s of processor\n"
        )
    };
    out.extend(status.tasks.iter().map(line));
    if status.tasks.is_empty() {
        out.push_str("  tasks     none\n");
    }
    out.extend(
        status
            .policy
            .iter()
            .map(|s| format!("  policy    {} = {}  ({})\n", s.name, s.value, s.from)),
    );
    if status.policy.is_empty() {
        out.push_str("  policy    none: guests stop and leave as soon as the owner is there\n");
    }
    out.extend(
        status
            .wrong
            .iter()
            .map(|line| format!("  wrong     {line}\n")),
    );
    out.extend(
        status
            .sources
            .iter()
            .map(|(name, says)| format!("  source    {name}: {says}\n")),
    );
    out
}

/// Formats the lines of a report about what guests may do, and how they are stopped.
fn guests_text(status: &Status) -> String {
    let leave = match (status.leave_at_us, status.then.as_deref()) {
        (Some(at), Some("kill")) => format!("; they are ended at {}", format_utc_time(Micros(at))),
        (Some(at), _) => format!("; they leave at {}", format_utc_time(Micros(at))),
        (None, Some(_)) => "; they are paused until guests are welcome again".into(),
        (None, None) => String::new(),
    };
    let why = if status.guests_why.is_empty() {
        String::new()
    } else {
        format!(": {}", status.guests_why)
    };
    let mut out = format!("  guests    {}{why}{leave}\n", status.guests);
    if !status.stopped_by.is_empty() {
        let why = if status.stopped_by_why.is_empty() {
            String::new()
        } else {
            format!(": {}", status.stopped_by_why)
        };
        out.push_str(&format!("  stopped   by {}{why}\n", status.stopped_by));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Result<OwnerCommand, ParseError> {
        parse(
            &line
                .split_whitespace()
                .map(str::to_string)
                .collect::<Vec<_>>(),
        )
    }

    /// All forms of `owner` are parsed.
    #[test]
    fn owner_arguments_parse() {
        let say = |state, seconds: Option<u64>| {
            Ok(OwnerCommand::DeclarePresence {
                state,
                duration: seconds.map(Duration::from_secs),
            })
        };
        assert_eq!(words(""), Ok(OwnerCommand::Status));
        assert_eq!(words("status"), Ok(OwnerCommand::Status));
        assert_eq!(words("away"), say(Presence::Away, None));
        assert_eq!(words("here --for 2h"), say(Presence::Here, Some(7200)));
        assert_eq!(words("away --for=30m"), say(Presence::Away, Some(1800)));
        assert_eq!(words("auto"), Ok(OwnerCommand::DetectPresence));
        let hours = |text: &str| text.parse::<Hours>().expect("good");
        assert_eq!(
            words("never 9-17"),
            Ok(OwnerCommand::ClosedHours(vec![hours("9-17")]))
        );
        assert_eq!(
            words("never mon-fri 9-17 and sat"),
            Ok(OwnerCommand::ClosedHours(vec![
                hours("mon-fri 9-17"),
                hours("sat")
            ]))
        );
        assert_eq!(
            words("never none"),
            Ok(OwnerCommand::ClosedHours(Vec::new()))
        );
        assert_eq!(words("limit 2 cores"), Ok(OwnerCommand::TaskLimit(Some(2))));
        assert_eq!(words("limit 1"), Ok(OwnerCommand::TaskLimit(Some(1))));
        assert_eq!(words("limit none"), Ok(OwnerCommand::TaskLimit(None)));
        assert_eq!(
            words("policy"),
            Ok(OwnerCommand::Policy(PolicyAction::Show))
        );
        assert_eq!(
            words("policy none"),
            Ok(OwnerCommand::Policy(PolicyAction::Withdraw))
        );
        assert_eq!(
            words("policy ./mine.toml"),
            Ok(OwnerCommand::Policy(PolicyAction::Publish(
                "./mine.toml".into()
            )))
        );
    }

    /// Errors name the wrong word.
    #[test]
    fn errors_name_the_wrong_word() {
        for (line, says) in [
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
            let error = words(line).expect_err(line).to_string();
            assert!(error.starts_with(says), "{line}: {error}");
        }
    }

    /// Directives accumulate, can be removed one by one, and leave no file in the end.
    #[test]
    fn directives_accumulate_and_can_be_removed() {
        let dir = tempfile::tempdir().expect("a folder");
        let uid = nix::unistd::geteuid().as_raw();
        let say = |line: &str| write_override(dir.path(), uid, &words(line).expect(line)).text;
        assert!(
            say("never mon-fri 9-17").starts_with("your directives: no guests mon-fri 9:00-17:00")
        );
        assert!(
            say("limit 2 cores").contains("no guests mon-fri 9:00-17:00; at most 2 of their tasks")
        );
        let here = say("here");
        assert!(
            here.contains("or until the next login or logout") && here.contains("at most 2"),
            "{here}"
        );
        assert!(!say("here --for 1h").contains("logout"));
        assert!(!say("auto").contains("here"));
        say("never none");
        assert_eq!(
            say("limit none"),
            "your directives: none; your presence is detected\n"
        );
        assert_eq!(std::fs::read_dir(dir.path()).expect("a folder").count(), 0);
    }

    /// A policy can be published, shown and withdrawn; an invalid one changes nothing.
    #[test]
    fn invalid_policy_changes_nothing() {
        let dir = tempfile::tempdir().expect("a folder");
        let uid = nix::unistd::geteuid().as_raw();
        let (file, shown) = (dir.path().join("mine.toml"), || {
            run_policy(dir.path(), uid, &PolicyAction::Show).text
        });
        let publish = |text: &str| {
            std::fs::write(&file, text).expect("the test's own file");
            run_policy(dir.path(), uid, &PolicyAction::Publish(file.clone()))
        };
        assert!(shown().starts_with("you have no policy here"));
        let done = publish("leave_after = 30\n");
        assert!(
            !done.failed
                && done.text.starts_with("your policy is in force (")
                && done.text.contains("leave_after = 30")
        );
        let wrong = publish("nice = 3\n\nnice = 4\n").refusal.expect("refused");
        assert!(
            wrong.contains("mine.toml:3: duplicate key")
                && wrong.ends_with("; nothing has changed"),
            "{wrong}"
        );
        let long = publish(&"#".repeat(POLICY_BYTES_MAX + 1))
            .refusal
            .expect("refused");
        assert!(long.contains("longer than"), "{long}");
        assert_eq!(shown(), "leave_after = 30\n");
        assert!(
            run_policy(dir.path(), uid, &PolicyAction::Publish("/nowhere/x".into()))
                .refusal
                .is_some()
        );
        run_policy(dir.path(), uid, &PolicyAction::Withdraw);
        assert!(shown().starts_with("you have no policy here"));
    }

    /// If directives cannot be written, the refusal is one line.
    #[test]
    fn write_error_is_one_line() {
        let outcome = write_override(Path::new("/nowhere"), 7, &OwnerCommand::TaskLimit(Some(1)));
        let line = outcome.refusal.expect("refused");
        assert!(
            outcome.failed
                && line.contains("/nowhere/sempa-owner-7.toml")
                && line.lines().count() == 1,
            "{line}"
        );
    }

    /// The status names the user, the times and the reasons.
    #[test]
    fn status_names_user_time_and_reason() {
        let status = Status {
            vm: "pvm".into(),
            user: "alice".into(),
            host: "h2".into(),
            owner: "present".into(),
            confidence: 99,
            why: "olga is logged in on tty2".into(),
            guests: "stopped".into(),
            guests_why: "olga is logged in on tty2".into(),
            leave_at_us: Some(60_000_000),
            then: Some("move".into()),
            stopped_by: "signals".into(),
            stopped_by_why: "SEMPA_FREEZER=off".into(),
            ..Status::default()
        };
        let text = status_text(&status);
        for part in [
            "virtual machine pvm of alice (h2)",
            "present, 99 % sure: olga is logged in on tty2",
            "stopped: olga is logged in on tty2; they leave at 00:01:00 UTC",
            "stopped   by signals: SEMPA_FREEZER=off",
            "tasks     none",
            "policy    none",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
