//! Notifications (`pvm_notify`): the exit of tasks, the loss of hosts, and new hosts.
//!
//! A pending notification is kept by the daemon of the task that requested it, and migrates with
//! that task.
//!
//! The exit of a task must be reported after everything that the task sent. The notification
//! therefore carries the watermark of the dead task's link to the receiver, and the receiver's
//! library delivers it only when it has received everything up to that watermark. If the last
//! messages have not arrived after `LAST_MESSAGES_TIMEOUT`, they are lost, and the notification is
//! delivered without them.

use super::rpc::RpcPurpose;
use super::tasks::watermark_for;
use super::{Machine, Timer};
use bytes::Bytes;
use sempa_proto::body::{Encoding, Packer};
use sempa_proto::host::{HostRequest, NotifySubject, PendingNotify};
use sempa_proto::message::ENC_XDR;
use sempa_proto::task::{NotifyRequest, NotifySubjects, Reply, SendWatermark, ToTask};
use sempa_proto::{Epoch, HostId, Message, Micros, PvmError, RequestId, Tid};

/// Largest number of pending notifications of one task.
pub(super) const PENDING_NOTIFIES_MAX: usize = 65_536;
/// Time after which the last messages of a dead task count as lost. Tasks that wait for them are
/// then notified of the exit.
const LAST_MESSAGES_TIMEOUT: Micros = Micros::from_secs(30);

impl Machine {
    /// Handles a request of `pvm_notify`.
    ///
    /// As in PVM, a cancelled notification of an exit or a lost host is sent immediately.
    pub(super) fn notify_request(&mut self, tid: Tid, id: RequestId, request: NotifyRequest) {
        let NotifyRequest {
            subjects: what,
            ctx,
            tag,
            cancel,
        } = request;
        let watch = |kind: NotifySubject| PendingNotify {
            subject: kind,
            ctx,
            tag,
        };
        let watches: Vec<PendingNotify> = match what {
            NotifySubjects::TaskExit(tids) => {
                if let Some(other) = tids.iter().find(|t| !t.is_task()) {
                    let reason = format!("{other} is not the id of a task");
                    return self.reply_error(tid, id, PvmError::BadParam, reason);
                }
                tids.into_iter()
                    .map(|t| watch(NotifySubject::TaskExit(t)))
                    .collect()
            }
            NotifySubjects::HostDelete(hosts) => hosts
                .into_iter()
                .map(|h| watch(NotifySubject::HostDelete(h)))
                .collect(),
            NotifySubjects::HostAdd { count } => {
                self.set_host_add_notify(
                    tid,
                    watch(NotifySubject::HostAdd {
                        count: if cancel { 0 } else { count },
                    }),
                );
                return self.reply(tid, id, Reply::Done);
            }
        };
        if cancel {
            watches
                .iter()
                .for_each(|watch| self.cancel_notify(tid, watch));
            return self.reply(tid, id, Reply::Done);
        }
        let pending = self.tasks.get(tid).map_or(0, |t| t.notifications.len());
        if pending + watches.len() > PENDING_NOTIFIES_MAX {
            let reason =
                format!("a task can wait for {PENDING_NOTIFIES_MAX} notifications at most");
            return self.reply_error(tid, id, PvmError::OutOfRes, reason);
        }
        self.reply(tid, id, Reply::Done);
        for watch in watches {
            self.add_notify(tid, watch);
        }
    }

    fn set_host_add_notify(&mut self, tid: Tid, watch: PendingNotify) {
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        let same = |w: &PendingNotify| {
            matches!(w.subject, NotifySubject::HostAdd { .. })
                && (w.ctx, w.tag) == (watch.ctx, watch.tag)
        };
        task.notifications.retain(|w| !same(w));
        if watch.subject != (NotifySubject::HostAdd { count: 0 }) {
            task.notifications.push(watch);
        }
    }

    fn cancel_notify(&mut self, tid: Tid, watch: &PendingNotify) {
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        let Some(at) = task.notifications.iter().position(|w| w == watch) else {
            return;
        };
        task.notifications.remove(at);
        self.send_tid_notification(tid, watch);
    }

    fn add_notify(&mut self, tid: Tid, watch: PendingNotify) {
        match watch.subject {
            NotifySubject::HostDelete(host)
                if host
                    .birth_host()
                    .is_none_or(|h| self.table.get(h).is_none()) =>
            {
                return self.send_tid_notification(tid, &watch);
            }
            // Registered before the check: the report of the task's exit may arrive before the
            // answer.
            _ => {
                if let Some(task) = self.tasks.get_mut(tid) {
                    task.notifications.push(watch.clone());
                }
            }
        }
        self.check_watched_task(tid, &watch);
    }

    /// Asks the daemon of a watched task whether the task is alive. It may have ended already, or
    /// may never have existed.
    fn check_watched_task(&mut self, watcher: Tid, watch: &PendingNotify) {
        if let NotifySubject::TaskExit(tid) = watch.subject
            && tid != watcher
        {
            self.call_host_of_task(
                tid,
                HostRequest::Watch { tid, watcher },
                RpcPurpose::Watch { watcher },
            );
        }
    }

    /// Sends a task the notifications that it requested of the exit of `tid`. `after` is the
    /// watermark of the dead task's link to the watcher.
    pub(super) fn notify_watcher_of_exit(
        &mut self,
        watcher: Tid,
        tid: Tid,
        after: Option<SendWatermark>,
    ) {
        let Some(task) = self.tasks.get_mut(watcher) else {
            return;
        };
        let fired: Vec<PendingNotify> = task
            .notifications
            .extract_if(.., |w| w.subject == NotifySubject::TaskExit(tid))
            .collect();
        for watch in fired {
            self.send_exit_notification(watcher, tid, &watch, after);
        }
    }

    /// Sends the notifications of an exit to all tasks of this host that requested them.
    pub(super) fn notify_watchers_of_exit(&mut self, tid: Tid, marks: &[SendWatermark]) {
        let waits = |w: &PendingNotify| w.subject == NotifySubject::TaskExit(tid);
        let watchers: Vec<Tid> = self
            .tasks
            .live
            .values()
            .filter(|t| t.notifications.iter().any(waits))
            .map(|t| t.tid)
            .collect();
        for watcher in watchers {
            self.notify_watcher_of_exit(watcher, tid, watermark_for(tid, marks, watcher));
        }
    }

    /// Sends a notification of an exit. The receiver's library delivers it after the dead task's
    /// last message.
    pub(super) fn send_exit_notification(
        &mut self,
        watcher: Tid,
        tid: Tid,
        watch: &PendingNotify,
        after: Option<SendWatermark>,
    ) {
        self.send_after_last_messages(
            notification_message(watcher, watch, pack_ints(&[tid.raw()])),
            tid,
            after,
        );
    }

    /// Sends a message from this daemon. The receiver's library delivers it only after everything
    /// that `exited` has sent.
    pub(super) fn send_after_last_messages(
        &mut self,
        message: Message,
        exited: Tid,
        after: Option<SendWatermark>,
    ) {
        let watcher = message.dst;
        // Daemons do not see the frames on a direct route between the two tasks. The receiver's
        // library knows its position.
        let after = after.unwrap_or(SendWatermark {
            peer: exited,
            end_seq: 1,
        });
        self.deliver(
            watcher,
            ToTask::Deliver {
                message,
                deliver_after: Some(after),
            },
        );
        self.set_timer(
            LAST_MESSAGES_TIMEOUT,
            Timer::LastMessages { watcher, exited },
        );
    }

    /// Handles the end of the time limit for the last messages of a dead task: the watcher must not
    /// wait for them any more.
    pub(super) fn handle_last_messages_timeout(&mut self, watcher: Tid, dead: Tid) {
        self.deliver(watcher, ToTask::PeerGone { tid: dead });
    }

    fn send_tid_notification(&mut self, watcher: Tid, watch: &PendingNotify) {
        let (NotifySubject::TaskExit(subject) | NotifySubject::HostDelete(subject)) = watch.subject
        else {
            return;
        };
        self.send_notification(watcher, watch, pack_ints(&[subject.raw()]));
    }

    fn send_notification(&mut self, dst: Tid, watch: &PendingNotify, body: Bytes) {
        self.deliver(
            dst,
            ToTask::Deliver {
                message: notification_message(dst, watch, body),
                deliver_after: None,
            },
        );
    }

    /// Handles the loss of a host: sends the notifications of the host's loss first, then those of
    /// the exit of its tasks.
    pub(super) fn notify_host_lost(&mut self, host: HostId) {
        let tids: Vec<Tid> = self.tasks.live.keys().copied().collect();
        for watcher in &tids {
            let Some(task) = self.tasks.get_mut(*watcher) else {
                continue;
            };
            let lost = |w: &mut PendingNotify| matches!(w.subject, NotifySubject::HostDelete(h) if h.birth_host() == Some(host));
            let fired: Vec<PendingNotify> = task.notifications.extract_if(.., lost).collect();
            for watch in fired {
                self.send_tid_notification(*watcher, &watch);
            }
        }
        for watcher in tids {
            let dead: Vec<Tid> = self
                .tasks
                .get(watcher)
                .map(|t| {
                    t.notifications
                        .iter()
                        .filter_map(|w| exit_subject(w).filter(|d| self.location(*d) == Some(host)))
                        .collect()
                })
                .unwrap_or_default();
            for tid in dead {
                self.notify_watcher_of_exit(watcher, tid, None);
            }
        }
    }

    /// Sends the notifications of new hosts.
    pub(super) fn notify_hosts_added(&mut self, added: &[HostId]) {
        let tids: Vec<Tid> = self.tasks.live.keys().copied().collect();
        for tid in tids {
            self.notify_task_of_added_hosts(tid, added);
        }
    }

    fn notify_task_of_added_hosts(&mut self, tid: Tid, added: &[HostId]) {
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        let mut fired = Vec::new();
        for watch in &mut task.notifications {
            if let NotifySubject::HostAdd { count } = &mut watch.subject {
                if *count > 0 {
                    *count -= 1;
                }
                fired.push(watch.clone());
            }
        }
        task.notifications
            .retain(|w| w.subject != NotifySubject::HostAdd { count: 0 });
        let mut words = vec![added.len() as i32];
        words.extend(added.iter().map(|h| h.tid().raw()));
        for watch in fired {
            self.send_notification(tid, &watch, pack_ints(&words));
        }
    }

    /// Checks the pending notifications of a task that has arrived from another host, and sends
    /// those whose event happened during its migration.
    pub(super) fn recheck_notifies(&mut self, tid: Tid, known: &[HostId], epoch: Epoch) {
        let Some(task) = self.tasks.get(tid) else {
            return;
        };
        for watch in task.notifications.clone() {
            match watch.subject {
                NotifySubject::HostDelete(host)
                    if host
                        .birth_host()
                        .is_none_or(|h| self.table.get(h).is_none()) =>
                {
                    self.cancel_notify(tid, &watch);
                }
                _ => self.check_watched_task(tid, &watch),
            }
        }
        if self.table.epoch > epoch {
            let added: Vec<HostId> = self
                .other_hosts()
                .into_iter()
                .filter(|h| !known.contains(h))
                .collect();
            if !added.is_empty() {
                self.notify_task_of_added_hosts(tid, &added);
            }
        }
    }
}

fn exit_subject(watch: &PendingNotify) -> Option<Tid> {
    match watch.subject {
        NotifySubject::TaskExit(tid) => Some(tid),
        _ => None,
    }
}

/// Builds a notification message in PVM's format.
fn notification_message(dst: Tid, watch: &PendingNotify, body: Bytes) -> Message {
    own_daemon_message(dst, (watch.ctx, watch.tag), body)
}

/// Builds a message whose source is the receiver's own daemon.
pub(super) fn own_daemon_message(dst: Tid, (ctx, tag): (i32, i32), body: Bytes) -> Message {
    Message {
        src: Tid::MY_DAEMON,
        dst,
        ctx,
        tag,
        wid: 0,
        enc: ENC_XDR,
        body,
    }
}

pub(super) fn pack_ints(words: &[i32]) -> Bytes {
    let mut body = Packer::new(Encoding::Xdr);
    body.items(words.iter().copied());
    body.finish()
}
