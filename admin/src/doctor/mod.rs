//! `doctor`: finds out what prevents migrations and checkpoints on this machine, and between this
//! machine and other hosts.
//!
//! `collect` and `remote` collect [`facts`]; `findings` derives the findings from them and does no
//! input or output. Abilities of the kernel are tested in processes of their own ([`probes`]).

mod collect;
mod facts;
mod findings;
mod probes;
mod remote;
mod system_calls;
mod udp;

use crate::outcome::Outcome;
use crate::table::printable;
use anyhow::Result;
use clap::Args;
use findings::{Finding, Level, find};

pub(crate) use probes::{ProbeCommand, run_probe};

#[derive(Debug, Args)]
pub(crate) struct DoctorOptions {
    /// Other hosts, as for ssh, that tasks shall migrate to and from
    #[arg(value_name = "HOST", value_parser = parse_host)]
    hosts: Vec<String>,
    /// UDP port of the daemons (PVMNETSOCKPORT), if the firewall permits only this one
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    port: Option<u16>,
    /// Print one JSON value
    #[arg(long)]
    json: bool,
}

/// Accepts a host for ssh. A host that begins with `-` would be an option of ssh.
fn parse_host(text: &str) -> Result<String, String> {
    let is_plain = |c: char| !c.is_whitespace() && !c.is_control();
    match !text.is_empty() && !text.starts_with('-') && text.chars().all(is_plain) {
        true => Ok(text.to_string()),
        false => Err("expected the name of a host".into()),
    }
}

pub(crate) fn run(options: &DoctorOptions) -> Result<Outcome> {
    let facts = facts::Facts {
        host: collect::collect_host(),
        peers: remote::examine(&options.hosts, options.port),
    };
    let findings = find(&facts);
    match options.json {
        true => println!("{}", serde_json::to_string(&findings)?),
        false => findings.iter().for_each(print_finding),
    }
    let worst = findings.iter().map(|finding| finding.level).max();
    Ok(match worst {
        None | Some(Level::Ok) => Outcome::Done,
        Some(Level::Warning) => Outcome::NotDone,
        Some(Level::Failure) => Outcome::Failures,
    })
}

fn print_finding(finding: &Finding) {
    let level = match finding.level {
        Level::Ok => "ok",
        Level::Warning => "warning",
        Level::Failure => "FAILURE",
    };
    println!(
        "{level:<8} {}: {}",
        printable(&finding.subject),
        printable(&finding.sentence)
    );
    if let Some(advice) = &finding.advice {
        println!("         {}", printable(advice));
    }
}
