//! The command line: commands, options and the settings that follow from them.

use clap::{Args as ClapArgs, Parser, Subcommand, ValueEnum};
use sempa_broker_session::{ForemanPolicy, Limits, Millis, Settings, Timing};
use std::path::PathBuf;

/// The message broker of a session of workers that come and go.
///
/// A session is a group of programs, the members, that send messages to each other through one
/// broker: a foreman and its workers. Members are tasks of the virtual machine, or programs outside
/// with a session file. The first member that joins a session in the virtual machine starts its
/// broker; 'pvm-broker start' does the same.
///
/// Exit status: 0 success, 79 the session is over, 2 wrong arguments, 1 any other failure.
#[derive(Debug, Parser)]
#[command(name = "pvm-broker", version)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Start the broker of a session unless the broker runs; after a kill of the broker, let the
    /// session go on.
    Start(StartOptions),
    /// List the members of a session.
    Members(ReportOptions),
    /// List the sessions of the virtual machine.
    Sessions(SessionsOptions),
    /// End a session for all its members.
    End(EndOptions),
    /// Write the session file for members outside the virtual machine.
    Secret(SecretOptions),
    /// Serve a session as a task; the other commands start this one.
    Serve(ServeOptions),
}

#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct StartOptions {
    pub(crate) session: String,
    /// Begin a new session if an earlier one of this name is over.
    #[arg(long)]
    pub(crate) new: bool,
    /// Host for the broker of a new session, such as one without an owner; by default the resource
    /// manager chooses.
    #[arg(long)]
    pub(crate) host: Option<String>,
    #[command(flatten)]
    pub(crate) broker: BrokerOptions,
}

#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct ReportOptions {
    pub(crate) session: String,
    /// Print one JSON value.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct SessionsOptions {
    /// Print one JSON value.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct EndOptions {
    pub(crate) session: String,
    /// Time that members get to finish.
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    pub(crate) within: u64,
}

#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct SecretOptions {
    pub(crate) session: String,
    /// The file to write, with mode 0600; by default SESSION.session in the current folder.
    #[arg(long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    /// Write the secret of a foreman, who may also end the session and list its members.
    #[arg(long)]
    pub(crate) foreman: bool,
    /// Name or address under which members outside reach the broker's host; may be repeated. By
    /// default the addresses of the host in the virtual machine.
    #[arg(long = "address", value_name = "HOST[:PORT]")]
    pub(crate) addresses: Vec<String>,
}

#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct ServeOptions {
    pub(crate) session: String,
    /// The task that waits for this broker, and the tag of the answer.
    #[arg(long, value_name = "TID:TAG", value_parser = parse_starter)]
    pub(crate) starter: Option<(i32, i32)>,
    #[command(flatten)]
    pub(crate) broker: BrokerOptions,
}

fn parse_starter(text: &str) -> Result<(i32, i32), String> {
    let numbers = text
        .split_once(':')
        .and_then(|(tid, tag)| Some((tid.parse().ok()?, tag.parse().ok()?)));
    numbers.ok_or_else(|| format!("{text:?} is not TID:TAG"))
}

/// When accepted messages are on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Durability {
    /// Before the sender is told; survives the end of the broker and of its host.
    Sync,
    /// Written, but not forced to the disk; survives the end of the broker.
    Write,
}

/// Policy for the loss of the last foreman.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ForemanDeath {
    /// Workers wait for the next foreman.
    Wait,
    /// The session ends for all members.
    End,
}

/// Options of a new session. A session that goes on after a kill of its broker keeps its limits.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct BrokerOptions {
    /// Program that the broker starts as a task when the session begins, with its arguments in one
    /// text: the session's foreman.
    #[arg(long, value_name = "PROGRAM")]
    pub(crate) foreman: Option<String>,
    /// Policy for the loss of the last foreman before the end of the session.
    #[arg(long, value_enum, default_value_t = ForemanDeath::Wait)]
    pub(crate) foreman_death: ForemanDeath,
    /// TCP port for members outside the virtual machine; 0 lets the system choose.
    #[arg(long, default_value_t = 0)]
    pub(crate) port: u16,
    /// When accepted messages are on the disk.
    #[arg(long, value_enum, default_value_t = Durability::Sync)]
    pub(crate) journal: Durability,
    /// Time without a member after which the session ends.
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    pub(crate) idle: u64,
    /// Time that a member outside may be away before it counts as gone.
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub(crate) grace: u64,
    /// Largest silence on a connection from outside, in each direction.
    #[arg(long, value_name = "SECONDS", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=29))]
    pub(crate) heartbeat: u64,
    /// Time for which the broker of an ended session still tells members outside that the session
    /// is over.
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub(crate) linger: u64,
    /// Largest number of members at once.
    #[arg(long, value_name = "NUMBER", default_value_t = Limits::default().members_max)]
    pub(crate) members: usize,
    /// Largest number of joins per second.
    #[arg(long, value_name = "NUMBER", default_value_t = Limits::default().joins_per_second_max)]
    pub(crate) joins_per_second: u32,
    /// Largest number of messages that wait for one member.
    #[arg(long, value_name = "NUMBER", default_value_t = Limits::default().member_messages_max)]
    pub(crate) member_messages: usize,
    /// Largest number of bytes that wait for one member.
    #[arg(long, value_name = "BYTES", default_value_t = Limits::default().member_bytes_max)]
    pub(crate) member_bytes: usize,
    /// Largest number of messages that wait in the session.
    #[arg(long, value_name = "NUMBER", default_value_t = Limits::default().session_messages_max)]
    pub(crate) session_messages: usize,
    /// Largest number of bytes that wait in the session.
    #[arg(long, value_name = "BYTES", default_value_t = Limits::default().session_bytes_max)]
    pub(crate) session_bytes: usize,
    /// Largest size of one message; at most 64 MiB.
    #[arg(long, value_name = "BYTES", default_value_t = Limits::default().message_bytes_max)]
    pub(crate) message_bytes: usize,
}

/// Largest value of `--message-bytes`, so that each message fits in one frame.
const MESSAGE_BYTES_CEILING: usize = 64 << 20;

impl BrokerOptions {
    pub(crate) fn settings(&self) -> Settings {
        let heartbeat = Millis(self.heartbeat * 1000);
        Settings {
            limits: Limits {
                members_max: self.members,
                joins_per_second_max: self.joins_per_second,
                member_messages_max: self.member_messages,
                member_bytes_max: self.member_bytes,
                session_messages_max: self.session_messages,
                session_bytes_max: self.session_bytes,
                message_bytes_max: self.message_bytes.min(MESSAGE_BYTES_CEILING),
                ..Limits::default()
            },
            timing: Timing {
                heartbeat,
                silence_max: Millis(heartbeat.0 * 3),
                grace: Millis(self.grace * 1000),
                idle: Millis(self.idle * 1000),
                ..Timing::default()
            },
            foreman_policy: match self.foreman_death {
                ForemanDeath::Wait => ForemanPolicy::Wait,
                ForemanDeath::End => ForemanPolicy::End,
            },
        }
    }
}
