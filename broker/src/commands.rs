//! The commands for users.

use crate::args::{
    BrokerOptions, Durability, EndOptions, ForemanDeath, ReportOptions, SecretOptions,
    SessionsOptions, StartOptions,
};
use crate::serve::read_identity;
use anyhow::{Context, Result, bail};
use libpvm::proto::Tid;
use libpvm::proto::message::ENC_XDR;
use libpvm::{Body, Match, Vm};
use sempa_broker_client::directory::{
    self, SessionEntry, StartSettings, find_or_start, next_connection,
};
use sempa_broker_client::session_file::{Secret, SessionFile};
use sempa_broker_client::tls::{fingerprint, role_secret};
use sempa_broker_client::wire::{BROKER_CTX, decode_to_member, encode};
use sempa_broker_client::{Error, Role, SessionReport};
use sempa_broker_session::{MemberState, Millis, Place, SessionEnd, ToBroker, ToMember};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Time limit for an answer of the broker.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

pub(crate) fn start(options: &StartOptions) -> Result<()> {
    let vm = Vm::enroll()?;
    let session = &options.session;
    if options.new
        && let Some(SessionEntry::Over { .. }) = directory::lookup(&vm, session)?
    {
        directory::remove(&vm, session)?;
    }
    let deadline = Instant::now() + ANSWER_TIMEOUT;
    let arguments = to_arguments(&options.broker);
    let settings = StartSettings {
        options: &arguments,
        host: options.host.as_deref(),
    };
    let broker = find_or_start(&vm, session, settings, deadline)?;
    println!("session {session} has the broker {broker}");
    Ok(vm.exit()?)
}

/// Returns the options as arguments of `pvm-broker serve`.
fn to_arguments(options: &BrokerOptions) -> Vec<String> {
    let mut arguments: Vec<String> = [
        ("--port", options.port.to_string()),
        ("--idle", options.idle.to_string()),
        ("--grace", options.grace.to_string()),
        ("--heartbeat", options.heartbeat.to_string()),
        ("--linger", options.linger.to_string()),
        ("--members", options.members.to_string()),
        ("--joins-per-second", options.joins_per_second.to_string()),
        ("--member-messages", options.member_messages.to_string()),
        ("--member-bytes", options.member_bytes.to_string()),
        ("--session-messages", options.session_messages.to_string()),
        ("--session-bytes", options.session_bytes.to_string()),
        ("--message-bytes", options.message_bytes.to_string()),
        (
            "--journal",
            match options.journal {
                Durability::Sync => "sync".into(),
                Durability::Write => "write".into(),
            },
        ),
        (
            "--foreman-death",
            match options.foreman_death {
                ForemanDeath::Wait => "wait".into(),
                ForemanDeath::End => "end".into(),
            },
        ),
    ]
    .into_iter()
    .flat_map(|(name, value)| [name.to_string(), value])
    .collect();
    if let Some(foreman) = &options.foreman {
        arguments.extend(["--foreman".to_string(), foreman.clone()]);
    }
    arguments
}

/// Returns the entry of a session that runs.
fn running_entry(vm: &Vm, session: &str) -> Result<(Tid, String, PathBuf)> {
    match directory::lookup(vm, session)? {
        Some(SessionEntry::Running {
            broker,
            host,
            folder,
            ..
        }) => Ok((Tid::from_raw(broker), host, folder.into())),
        Some(SessionEntry::Over { end, .. }) => Err(Error::Over {
            session: session.to_string(),
            end,
        }
        .into()),
        None => bail!(
            "there is no session {session} in this virtual machine; 'pvm-broker sessions' lists all sessions"
        ),
    }
}

/// Sends a frame to the broker and returns the answer.
fn ask(vm: &Vm, session: &str, frame: &ToBroker) -> Result<ToMember> {
    let (broker, host, _) = running_entry(vm, session)?;
    let connection = next_connection();
    let body = Body {
        enc: ENC_XDR,
        bytes: encode(frame).into(),
    };
    let end_notice = vm.watch_tasks(&[broker])?;
    vm.send_in_context(broker, BROKER_CTX, connection, body)?;
    let answer = Match::any().ctx(BROKER_CTX).tag(connection);
    let deadline = Instant::now() + ANSWER_TIMEOUT;
    let message = vm
        .runtime()
        .wait_for_inbox(Some(deadline), &mut |inbox| {
            inbox.take_first(|message| {
                answer.matches(message) || end_notice.is_notice_message(message)
            })
        })
        .map_err(|_| anyhow::anyhow!("the virtual machine has ended"))?
        .with_context(|| format!("the broker of session {session} on {host} does not answer"))?;
    if end_notice.is_notice_message(&message) {
        bail!(
            "the broker of session {session} on {host} has ended without its session; \
             'pvm-broker start {session}' lets the session go on"
        );
    }
    decode_to_member(&message.body).context("the broker has another version")
}

pub(crate) fn print_members(options: &ReportOptions) -> Result<()> {
    let vm = Vm::enroll()?;
    let ToMember::Report(report) = ask(&vm, &options.session, &ToBroker::Inspect)? else {
        bail!("the broker's answer is not a report; use programs of one version");
    };
    if options.json {
        println!("{}", serde_json::to_string(&*report)?);
    } else {
        print!("{}", format_report(&report));
    }
    Ok(vm.exit()?)
}

fn format_report(report: &SessionReport) -> String {
    let counts = &report.counts;
    let mut text = format!(
        "session {}: {} joins; messages: {} taken, {} delivered, {} returned, {} dropped, {} refused, {} waiting\n",
        report.session,
        counts.joins,
        counts.taken,
        counts.delivered,
        counts.returned,
        counts.dropped,
        counts.refused,
        report.waiting
    );
    if let Some(end) = report.end {
        text.push_str(&format!("the session ends: {end}\n"));
    }
    text.push_str(&format!(
        "{:>6} {:>4} {:<8} {:<22} {:<16} {:>8} {:>8} {:>8} {:>9}\n",
        "MEMBER", "INC", "ROLE", "STATE", "HOST", "SENT", "RECEIVED", "WAITING", "OLDEST"
    ));
    for member in &report.members {
        let state = match member.state {
            MemberState::Joining => "joining".to_string(),
            MemberState::Present => "present".to_string(),
            MemberState::Away => "away".to_string(),
            MemberState::Gone(reason) => format!("gone ({reason})"),
        };
        let place = match member.place {
            Place::Inside { tid } => format!("{} t{tid:x}", member.profile.host),
            Place::Outside => format!("{} outside", member.profile.host),
        };
        text.push_str(&format!(
            "{:>6} {:>4} {:<8} {:<22} {:<16} {:>8} {:>8} {:>8} {:>7}ms\n",
            member.member.0,
            member.incarnation.0,
            member.profile.role.to_string(),
            state,
            place,
            member.sent,
            member.received,
            member.waiting,
            member.oldest.0
        ));
    }
    text
}

pub(crate) fn print_sessions(options: &SessionsOptions) -> Result<()> {
    let vm = Vm::enroll()?;
    let sessions = directory::list(&vm)?;
    if options.json {
        println!("{}", serde_json::to_string(&sessions)?);
    } else {
        for (name, entry) in &sessions {
            match entry {
                SessionEntry::Running { broker, host, .. } => {
                    println!("{name}: broker t{broker:x} on {host}");
                }
                SessionEntry::Over { end, .. } => println!("{name}: over, {end}"),
            }
        }
    }
    Ok(vm.exit()?)
}

pub(crate) fn end(options: &EndOptions) -> Result<()> {
    let vm = Vm::enroll()?;
    let within = Millis(options.within.saturating_mul(1000));
    let ToMember::Ending(end) = ask(&vm, &options.session, &ToBroker::End { within })? else {
        bail!("the broker's answer is not about the end; use programs of one version");
    };
    match end {
        SessionEnd::Operator => println!("session {} ends", options.session),
        end => println!("session {} already ends: {end}", options.session),
    }
    Ok(vm.exit()?)
}

pub(crate) fn write_secret(options: &SecretOptions) -> Result<()> {
    let vm = Vm::enroll()?;
    let session = &options.session;
    let (_, host, folder) = running_entry(&vm, session)?;
    let identity = read_identity(&folder)?;
    let hosts = vm.config()?;
    let mut addresses: Vec<String> = options
        .addresses
        .iter()
        .map(|address| match address.rsplit_once(':') {
            Some((_, port)) if port.parse::<u16>().is_ok() => address.clone(),
            _ => format!("{address}:{}", identity.port),
        })
        .collect();
    if addresses.is_empty() {
        let entry = hosts
            .find_by_name(&host)
            .with_context(|| format!("the broker's host {host} is not in the virtual machine"))?;
        addresses = entry
            .addresses
            .iter()
            .filter(|address| !address.ip().is_loopback() || entry.addresses.len() == 1)
            .map(|address| std::net::SocketAddr::new(address.ip(), identity.port).to_string())
            .collect();
    }
    let role = match options.foreman {
        true => Role::Foreman,
        false => Role::Worker,
    };
    let file = SessionFile {
        session: session.clone(),
        role,
        addresses,
        fingerprint: fingerprint(&identity.certificate),
        secret: Secret(role_secret(&identity.session_key, role)),
    };
    let path = options
        .output
        .clone()
        .unwrap_or_else(|| format!("{session}.session").into());
    file.write(&path)?;
    println!(
        "{} lets a {role} join session {session} from {}; keep it secret",
        path.display(),
        file.addresses.join(", ")
    );
    Ok(vm.exit()?)
}
