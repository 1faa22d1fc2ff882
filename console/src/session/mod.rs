//! The state that lasts between commands: aliases, options, the environment for tasks, and jobs.
//!
//! Commands read and change the state; this module executes no commands. [`job_output`] handles the
//! messages that no command waits for.

pub(crate) mod job_output;
pub(crate) mod jobs;
pub(crate) mod options;
mod records;
pub(crate) mod trace_events;

use self::job_output::{JobOutput, TAG_HOSTS};
use self::jobs::Jobs;
use self::options::Options;
use crate::virtual_machine::{VirtualMachine, put_mailbox_entry};
use libpvm::Error;
use libpvm::trace_events::EventMask;
use sempa_proto::HostId;
use sempa_proto::body::{Encoding, Packer};
use sempa_proto::message::CTX_BASE;
use sempa_proto::sm::NO_RESET_CLASS;
use sempa_proto::task::{NotifyRequest, NotifySubjects, Request};
use std::collections::{BTreeMap, BTreeSet};

/// Mailbox flag that allows several entries in one class.
const MBOX_MULTI_INSTANCE: i32 = 2;

/// Names from the session that the editor offers for completion.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct CompletionNames {
    pub(crate) aliases: Vec<String>,
    pub(crate) variables: Vec<String>,
}

/// State that lasts between commands.
///
/// Commands use `Session` with a virtual machine of any type. A reference to `Session<Vm>`, or in
/// tests to a session with a fake virtual machine, coerces to a reference to `Session`.
pub(crate) struct Session<M: ?Sized = dyn VirtualMachine> {
    pub(crate) aliases: BTreeMap<String, Vec<String>>,
    pub(crate) options: Options,
    /// Event kinds that traced tasks record.
    pub(crate) event_mask: EventMask,
    /// Environment variables of the console. Spawned tasks receive the exported variables.
    pub(crate) env: BTreeMap<String, String>,
    pub(crate) jobs: Jobs,
    pub(crate) job_outputs: BTreeMap<u32, JobOutput>,
    /// Exit code of the first job of this session that has finished with another exit code than 0;
    /// 0 if there is none.
    pub(crate) first_job_failure: u8,
    /// True if the console receives the events of the log.
    follows_events: bool,
    /// Hosts that need no announcement: they existed at the start, were announced, or were added by
    /// a command of this session.
    announced_hosts: BTreeSet<HostId>,
    /// True for an interactive console. Work that must outlive the console then runs in another
    /// process.
    pub(crate) is_interactive: bool,
    /// True if the current command line requested JSON.
    pub(crate) prints_json: bool,
    pub(crate) vm: M,
}

impl<M: VirtualMachine> Session<M> {
    /// Creates a session with a copy of the environment.
    pub(crate) fn new(machine: M, env: BTreeMap<String, String>) -> Self {
        Self {
            aliases: BTreeMap::new(),
            options: Options::default(),
            event_mask: trace_events::xpvm_mask(),
            env,
            jobs: Jobs::default(),
            job_outputs: BTreeMap::new(),
            first_job_failure: 0,
            follows_events: false,
            announced_hosts: BTreeSet::new(),
            is_interactive: false,
            prints_json: false,
            vm: machine,
        }
    }
}

impl Session {
    /// True while output of a job may still arrive.
    pub(crate) fn has_jobs(&self) -> bool {
        !self.jobs.is_empty() || !self.job_outputs.is_empty()
    }

    /// Returns the names that the editor can complete.
    pub(crate) fn completion_names(&self) -> CompletionNames {
        CompletionNames {
            aliases: self.aliases.keys().cloned().collect(),
            variables: self.env.keys().cloned().collect(),
        }
    }

    /// Records that a host needs no announcement, because a command of this session added the host.
    pub(crate) fn skip_announcement(&mut self, host: HostId) {
        self.announced_hosts.insert(host);
    }

    /// Prepares an interactive console: protects the console from `reset`, requests notifications
    /// of new hosts, and makes drains run in another process.
    ///
    /// # Errors
    /// Fails if the host table cannot be read. Errors of the protection and of the notifications
    /// are ignored.
    pub(crate) fn register_interactive(&mut self) -> Result<(), Error> {
        self.is_interactive = true;
        self.announced_hosts = self.vm.hosts()?.hosts.iter().map(|host| host.id).collect();
        let mut body = Packer::new(Encoding::Xdr);
        body.pack_int(self.vm.tid().raw());
        // Both requests are optional. Without the first, `reset` also ends this console; without
        // the second, hosts that other consoles add are not announced.
        let _ = put_mailbox_entry(&self.vm, NO_RESET_CLASS, MBOX_MULTI_INSTANCE, body);
        let notify_subjects = NotifySubjects::HostAdd { messages_max: -1 };
        let notify_request = NotifyRequest {
            subjects: notify_subjects,
            ctx: CTX_BASE,
            tag: TAG_HOSTS,
            is_cancellation: false,
        };
        let _ = self.vm.ask(Request::Notify(notify_request));
        Ok(())
    }

    /// Returns the environment entries for spawned tasks: `PVM_EXPORT` and the variables in its
    /// list.
    pub(crate) fn exported_environment(&self) -> Vec<Vec<u8>> {
        let Some(export_list) = self
            .env
            .get("PVM_EXPORT")
            .filter(|export_list| !export_list.is_empty())
        else {
            return Vec::new();
        };
        let names = std::iter::once("PVM_EXPORT")
            .chain(export_list.split(':').filter(|name| !name.is_empty()));
        names
            .filter_map(|name| {
                self.env
                    .get(name)
                    .map(|value| format!("{name}={value}").into_bytes())
            })
            .collect()
    }
}
