//! Notifications (`pvm_notify`): the exit of tasks, the loss of hosts, and new hosts.
//!
//! The daemon of a task stores the notifications that the task has requested and not received yet.
//! They migrate with the task.
//!
//! The exit of a task must be reported after everything that the task sent. The notification
//! therefore carries the watermark of the dead task's link to the receiver. The receiver's library
//! delivers the notification when it has received everything up to that watermark. If the last
//! messages have not arrived after `LAST_MESSAGES_TIMEOUT`, they are lost, and the notification is
//! delivered without them.

use super::rpc::RpcPurpose;
use super::tasks::{ExitPositions, watermark_for};
use super::{Machine, Timer};
use bytes::Bytes;
use sempa_proto::body::{Encoding, Packer};
use sempa_proto::causal::Past;
use sempa_proto::host::{HostRequest, NotifySubject, PendingNotification};
use sempa_proto::message::ENC_XDR;
use sempa_proto::task::{NotifyRequest, NotifySubjects, Reply, SendWatermark, ToTask};
use sempa_proto::{Epoch, HostId, Message, Micros, PvmError, RequestId, Tid};

/// Largest number of pending notifications of one task.
pub(super) const PENDING_NOTIFIES_MAX: usize = 65_536;
/// Time after which the last messages of a dead task count as lost. Tasks that wait for these
/// messages are then notified of the exit.
const LAST_MESSAGES_TIMEOUT: Micros = Micros::from_secs(30);

impl Machine {
    /// Handles a request of `pvm_notify`: adds notifications, or cancels them.
    ///
    /// As in PVM, a cancelled notification of an exit or a lost host is sent immediately.
    pub(super) fn handle_notify_request(
        &mut self,
        tid: Tid,
        id: RequestId,
        request: NotifyRequest,
    ) {
        let NotifyRequest {
            subjects,
            ctx,
            tag,
            is_cancellation,
        } = request;
        let watch = |subject: NotifySubject| PendingNotification { subject, ctx, tag };
        let watches: Vec<PendingNotification> = match subjects {
            NotifySubjects::TaskExit(tids) => {
                if let Some(invalid_tid) = tids.iter().find(|t| !t.is_task()) {
                    let reason = format!("{invalid_tid} is not the id of a task");
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
            NotifySubjects::HostAdd {
                messages_max: count,
            } => {
                self.set_host_add_notify(
                    tid,
                    watch(NotifySubject::HostAdd {
                        remaining_messages: if is_cancellation { 0 } else { count },
                    }),
                );
                return self.reply(tid, id, Reply::Done);
            }
        };
        if is_cancellation {
            watches
                .iter()
                .for_each(|watch| self.cancel_notify(tid, watch));
            return self.reply(tid, id, Reply::Done);
        }
        let pending_count = self.tasks.get(tid).map_or(0, |t| t.notifications.len());
        if pending_count + watches.len() > PENDING_NOTIFIES_MAX {
            let reason =
                format!("a task can wait for {PENDING_NOTIFIES_MAX} notifications at most");
            return self.reply_error(tid, id, PvmError::OutOfRes, reason);
        }
        self.reply(tid, id, Reply::Done);
        for watch in watches {
            self.add_notify(tid, watch);
        }
    }

    fn set_host_add_notify(&mut self, tid: Tid, watch: PendingNotification) {
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        let is_same_watch = |w: &PendingNotification| {
            matches!(w.subject, NotifySubject::HostAdd { .. })
                && (w.ctx, w.tag) == (watch.ctx, watch.tag)
        };
        task.notifications.retain(|w| !is_same_watch(w));
        if watch.subject
            != (NotifySubject::HostAdd {
                remaining_messages: 0,
            })
        {
            task.notifications.push(watch);
        }
    }

    fn cancel_notify(&mut self, tid: Tid, watch: &PendingNotification) {
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        let Some(index) = task.notifications.iter().position(|w| w == watch) else {
            return;
        };
        task.notifications.remove(index);
        self.send_tid_notification(tid, watch);
    }

    fn add_notify(&mut self, tid: Tid, watch: PendingNotification) {
        match watch.subject {
            NotifySubject::HostDelete(host)
                if host
                    .birth_host()
                    .is_none_or(|h| self.table.get(h).is_none()) =>
            {
                return self.send_tid_notification(tid, &watch);
            }
            // The notification is added before the check, because the exit may be reported before
            // the check is answered.
            _ => {
                if let Some(task) = self.tasks.get_mut(tid) {
                    task.notifications.push(watch.clone());
                }
            }
        }
        self.check_watched_task(tid, &watch);
    }

    /// Asks the daemon of a watched task whether the task is alive. The watched task may have ended
    /// already, or may never have existed.
    fn check_watched_task(&mut self, watcher: Tid, watch: &PendingNotification) {
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

    /// Sends the task `watcher` all notifications of the exit of `tid` that the watcher has
    /// requested. `watermark` is the watermark of the dead task's link to the watcher; `past` is
    /// its clock, and its messages to others that are in transit.
    pub(super) fn notify_watcher_of_exit(
        &mut self,
        watcher: Tid,
        tid: Tid,
        watermark: Option<SendWatermark>,
        past: &Past,
    ) {
        let Some(task) = self.tasks.get_mut(watcher) else {
            return;
        };
        let due_watches: Vec<PendingNotification> = task
            .notifications
            .extract_if(.., |w| w.subject == NotifySubject::TaskExit(tid))
            .collect();
        if !due_watches.is_empty() {
            self.tell_past_of_ended(watcher, past);
        }
        for watch in due_watches {
            self.send_exit_notification(watcher, tid, &watch, watermark);
        }
    }

    /// Sends the notifications of an exit to all tasks of this host that requested them.
    pub(super) fn notify_watchers_of_exit(&mut self, tid: Tid, positions: &ExitPositions) {
        let watches_task = |w: &PendingNotification| w.subject == NotifySubject::TaskExit(tid);
        let watchers: Vec<Tid> = self
            .tasks
            .live_tasks
            .values()
            .filter(|t| t.notifications.iter().any(watches_task))
            .map(|t| t.tid)
            .collect();
        for watcher in watchers {
            let watermark = watermark_for(tid, &positions.watermarks, watcher);
            self.notify_watcher_of_exit(watcher, tid, watermark, &positions.past);
        }
    }

    /// Sends a notification of an exit. The receiver's library delivers it after the dead task's
    /// last message.
    pub(super) fn send_exit_notification(
        &mut self,
        watcher: Tid,
        tid: Tid,
        watch: &PendingNotification,
        watermark: Option<SendWatermark>,
    ) {
        self.send_after_last_messages(
            notification_message(watcher, watch, pack_ints(&[tid.raw()])),
            tid,
            watermark,
        );
    }

    /// Sends a message from this daemon. The receiver's library delivers it only after everything
    /// that `exited_task` has sent, up to the watermark `watermark`.
    pub(super) fn send_after_last_messages(
        &mut self,
        message: Message,
        exited_task: Tid,
        watermark: Option<SendWatermark>,
    ) {
        let watcher = message.dst;
        // Without a known watermark the position 1 is used: daemons do not see the frames on a
        // direct route between the two tasks, but the receiver's library knows the position of the
        // link.
        let watermark = watermark.unwrap_or(SendWatermark {
            peer: exited_task,
            end_seq: 1,
        });
        self.deliver(
            watcher,
            ToTask::Deliver {
                message,
                deliver_after: Some(watermark),
            },
        );
        self.set_timer(
            LAST_MESSAGES_TIMEOUT,
            Timer::LastMessagesTimeout {
                watcher,
                exited: exited_task,
            },
        );
    }

    /// Handles the end of the time limit for the last messages of a dead task: the watcher must no
    /// longer wait for them.
    pub(super) fn handle_last_messages_timeout(&mut self, watcher: Tid, exited_task: Tid) {
        self.deliver(watcher, ToTask::PeerGone { tid: exited_task });
    }

    fn send_tid_notification(&mut self, watcher: Tid, watch: &PendingNotification) {
        let (NotifySubject::TaskExit(subject) | NotifySubject::HostDelete(subject)) = watch.subject
        else {
            return;
        };
        self.send_notification(watcher, watch, pack_ints(&[subject.raw()]));
    }

    fn send_notification(&mut self, dst: Tid, watch: &PendingNotification, body: Bytes) {
        self.deliver(
            dst,
            ToTask::Deliver {
                message: notification_message(dst, watch, body),
                deliver_after: None,
            },
        );
    }

    /// Handles the loss of a host: sends the notifications of the host's loss first, then those of
    /// the exits of its tasks.
    pub(super) fn notify_host_lost(&mut self, host: HostId) {
        let tids: Vec<Tid> = self.tasks.live_tasks.keys().copied().collect();
        for watcher in &tids {
            let Some(task) = self.tasks.get_mut(*watcher) else {
                continue;
            };
            let watches_host = |w: &mut PendingNotification| matches!(w.subject, NotifySubject::HostDelete(h) if h.birth_host() == Some(host));
            let due_watches: Vec<PendingNotification> =
                task.notifications.extract_if(.., watches_host).collect();
            for watch in due_watches {
                self.send_tid_notification(*watcher, &watch);
            }
        }
        for watcher in tids {
            let locations = &self.locations;
            let Some(task) = self.tasks.get_mut(watcher) else {
                continue;
            };
            let watches_dead_task = |w: &mut PendingNotification| {
                exit_subject(w).is_some_and(|tid| locations.host_of(tid) == Some(host))
            };
            let due_watches: Vec<PendingNotification> = task
                .notifications
                .extract_if(.., watches_dead_task)
                .collect();
            for watch in due_watches {
                if let NotifySubject::TaskExit(tid) = watch.subject {
                    self.send_exit_notification(watcher, tid, &watch, None);
                }
            }
        }
    }

    /// Sends the notifications of new hosts to all tasks of this host that requested them.
    pub(super) fn notify_hosts_added(&mut self, added_hosts: &[HostId]) {
        let tids: Vec<Tid> = self.tasks.live_tasks.keys().copied().collect();
        for tid in tids {
            self.notify_task_of_added_hosts(tid, added_hosts);
        }
    }

    fn notify_task_of_added_hosts(&mut self, tid: Tid, added_hosts: &[HostId]) {
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        let mut due_watches = Vec::new();
        for watch in &mut task.notifications {
            if let NotifySubject::HostAdd {
                remaining_messages: count,
            } = &mut watch.subject
            {
                if *count > 0 {
                    *count -= 1;
                }
                due_watches.push(watch.clone());
            }
        }
        task.notifications.retain(|w| {
            w.subject
                != NotifySubject::HostAdd {
                    remaining_messages: 0,
                }
        });
        let mut body_ints = vec![added_hosts.len() as i32];
        body_ints.extend(added_hosts.iter().map(|h| h.tid().raw()));
        for watch in due_watches {
            self.send_notification(tid, &watch, pack_ints(&body_ints));
        }
    }

    /// Asks again whether the watched tasks on a host are alive, after a new session with the host:
    /// an exit notice may be lost with the previous session. Questions without a reply were sent
    /// again already.
    pub(super) fn recheck_watches_on(&mut self, host: HostId) {
        let open_watches = self.rpcs.open_watches();
        let mut watches: Vec<(Tid, PendingNotification)> = Vec::new();
        for task in self.tasks.live_tasks.values() {
            let is_there = |w: &&PendingNotification| {
                exit_subject(w).is_some_and(|tid| {
                    self.location(tid) == Some(host) && !open_watches.contains(&(tid, task.tid))
                })
            };
            let watches_there = task.notifications.iter().filter(is_there).cloned();
            watches.extend(watches_there.map(|watch| (task.tid, watch)));
        }
        for (watcher, watch) in watches {
            self.check_watched_task(watcher, &watch);
        }
    }

    /// Checks the pending notifications of a task that has arrived from another host. Sends those
    /// whose event happened during the migration.
    pub(super) fn recheck_notifications(&mut self, tid: Tid, known_hosts: &[HostId], epoch: Epoch) {
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
            let added_hosts: Vec<HostId> = self
                .other_hosts()
                .into_iter()
                .filter(|h| !known_hosts.contains(h))
                .collect();
            if !added_hosts.is_empty() {
                self.notify_task_of_added_hosts(tid, &added_hosts);
            }
        }
    }
}

fn exit_subject(watch: &PendingNotification) -> Option<Tid> {
    match watch.subject {
        NotifySubject::TaskExit(tid) => Some(tid),
        _ => None,
    }
}

/// Builds a notification message in PVM's format.
fn notification_message(dst: Tid, watch: &PendingNotification, body: Bytes) -> Message {
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

pub(super) fn pack_ints(numbers: &[i32]) -> Bytes {
    let mut body = Packer::new(Encoding::Xdr);
    body.pack_items(numbers.iter().copied());
    body.finish()
}
