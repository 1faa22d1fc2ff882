//! Queries of this daemon's internal state (`pvm_tickle`): lists for its log, and single numbers.

use super::Machine;
use sempa_proto::task::{DEBUG_QUERY_INTS_MAX, Reply};
use sempa_proto::{HostId, PvmError, RequestId, Tid};

impl Machine {
    /// Answers a query. The first number of the query selects the effect, as in PVM:
    ///
    /// | Number | Effect |
    /// | --- | --- |
    /// | 0, 9 | writes sizes of the daemon's tables to the log |
    /// | 1 | writes the hosts to the log |
    /// | 2 | writes the tasks to the log |
    /// | 3 | writes the unanswered requests to other daemons to the log |
    /// | 4 | writes the mailbox to the log |
    /// | 5 | returns the debug mask |
    /// | 6 | sets the debug mask |
    /// | 7 | sets a window in PVM; without effect here |
    /// | 8 | declares a host lost |
    pub(super) fn answer_debug_query(&mut self, tid: Tid, id: RequestId, query_numbers: &[i32]) {
        if query_numbers.is_empty() || query_numbers.len() > DEBUG_QUERY_INTS_MAX {
            let reason = format!("a query has 1 to {DEBUG_QUERY_INTS_MAX} numbers");
            return self.reply_error(tid, id, PvmError::BadParam, reason);
        }
        let argument = query_numbers.get(1).copied().unwrap_or(0);
        let reply_numbers = match query_numbers[0] {
            0 | 9 => {
                self.log_sizes();
                vec![]
            }
            1 => {
                self.log_hosts();
                vec![]
            }
            2 => {
                self.log_tasks();
                vec![]
            }
            3 => {
                let lines = self.rpcs.log_lines();
                self.log_list("requests without an answer", lines);
                vec![]
            }
            4 => {
                let lines = self
                    .master
                    .as_ref()
                    .map(|m| m.mailbox.log_lines())
                    .unwrap_or_default();
                self.log_list("mailbox", lines);
                vec![]
            }
            5 => vec![self.debug_mask],
            6 => {
                self.debug_mask = argument;
                vec![]
            }
            8 => vec![i32::from(
                self.declare_host_lost(tid, Tid::from_raw(argument)),
            )],
            // Number 7 and unknown numbers.
            _ => vec![],
        };
        self.reply(tid, id, Reply::DebugValues(reply_numbers));
    }

    /// Largest number of lines that one query writes to the log. The rest of a longer list is left
    /// out, so that a query cannot fill the log.
    const LOG_LIST_LINES_MAX: usize = 1000;

    fn log_list(&mut self, title: &str, lines: Vec<String>) {
        self.log(format!("{title}: {}", lines.len()));
        for line in lines.into_iter().take(Self::LOG_LIST_LINES_MAX) {
            self.log(format!("  {line}"));
        }
    }

    fn log_hosts(&mut self) {
        let host_line = |h: &sempa_proto::table::HostEntry| {
            format!("{:x} {} {} {}", h.id.tid(), h.name, h.arch, h.speed)
        };
        let lines = self.table.hosts.iter().map(host_line).collect();
        self.log_list("hosts", lines);
    }

    fn log_tasks(&mut self) {
        let task_line = |t: &super::tasks::Task| {
            format!(
                "{} parent {} process {} flags {:#x} {}",
                t.tid, t.parent, t.pid, t.flags, t.name
            )
        };
        let lines = self.tasks.live_tasks.values().map(task_line).collect();
        self.log_list("tasks", lines);
    }

    fn log_sizes(&mut self) {
        let lines = vec![
            format!("{} tasks", self.tasks.live_tasks.len()),
            format!("{} contexts", self.context_owners.len()),
            format!("{} timers", self.timers.len()),
            format!("{} hosts, epoch {}", self.table.hosts.len(), self.epoch),
        ];
        self.log_list("sizes", lines);
    }

    /// Declares a host lost, because the task `tid` considers it dead. Returns false, without
    /// effect, if this daemon is not the master, or if the host is the master or unknown.
    fn declare_host_lost(&mut self, tid: Tid, host: Tid) -> bool {
        let host = super::requests::named_host(host).filter(|host| *host != HostId::MASTER);
        let Some(host) =
            host.filter(|host| self.master.is_some() && self.table.get(*host).is_some())
        else {
            return false;
        };
        self.handle_host_lost(host, &format!("declared lost by {tid}"));
        true
    }
}
