//! Jobs of the simulated tasks: snapshots, and restarts from them.

use super::world::{Task, World, tid};
use sempa_proto::causal::Restart;
use sempa_proto::link::LinkEvent;
use std::collections::{BTreeMap, BTreeSet};

impl World {
    /// Takes a snapshot of the tasks of a job at one moment.
    pub(crate) fn take_snapshot(&mut self, job: usize) {
        let is_member = |task: &Task| task.job == job && !task.has_ended;
        let members: Vec<usize> = (0..self.tasks.len())
            .filter(|task| is_member(&self.tasks[*task]))
            .collect();
        for member in &members {
            self.close_rings_of(*member);
        }
        let snapshot = members.iter().map(|m| (*m, self.tasks[*m].clone()));
        self.snapshots.insert(job, snapshot.collect());
    }

    /// Kills the tasks of a job and restores those of its snapshot.
    pub(crate) fn restart(&mut self, job: usize) {
        let Some(snapshot) = self.snapshots.get(&job).cloned() else {
            return;
        };
        let job_tasks: BTreeSet<usize> = (0..self.tasks.len())
            .filter(|task| self.tasks[*task].job == job)
            .collect();
        self.record_lost_messages(&job_tasks, &snapshot);
        for task in &job_tasks {
            self.tasks[*task].has_ended = true;
        }
        for task in &job_tasks {
            self.close_rings_of(*task);
            self.tasks[*task].links.clear();
        }
        self.drop_frames(&job_tasks);
        self.last_incarnation += 1;
        for (member, task) in &snapshot {
            self.tasks[*member] = task.clone();
            self.tasks[*member].incarnation = self.last_incarnation;
            for peer in &mut self.tasks {
                peer.untold_ends.remove(member);
            }
        }
        for task in job_tasks.iter().filter(|task| !snapshot.contains_key(task)) {
            for peer in &mut self.tasks {
                peer.untold_ends.insert(*task);
            }
        }
        for member in snapshot.keys() {
            self.roll_back(*member, &snapshot);
        }
        for member in snapshot.keys() {
            self.finish_accept(*member);
        }
    }

    /// Determines which messages may never arrive because of a restart, and which arrive although
    /// their sender had ended.
    fn record_lost_messages(
        &mut self,
        job_tasks: &BTreeSet<usize>,
        snapshot: &BTreeMap<usize, Task>,
    ) {
        let has_outsiders = (0..self.tasks.len()).any(|task| !job_tasks.contains(&task));
        for (id, message) in self.messages.iter().enumerate() {
            let is_received = self.tasks[message.receiver].received.contains(id);
            if has_outsiders && !is_received {
                // A restarted task may have covered the mark of this message by a void one.
                self.rearriving.insert(id);
            }
            let is_from_job = job_tasks.contains(&message.sender);
            let is_to_job = job_tasks.contains(&message.receiver);
            let sender = snapshot.get(&message.sender);
            let receiver = snapshot.get(&message.receiver);
            let was_sent = sender.is_some_and(|sender| sender.sent.contains(id));
            let was_received = receiver.is_some_and(|receiver| receiver.received.contains(id));
            let will_arrive = was_sent && receiver.is_some() && !self.dropped.contains(id);
            if is_from_job && is_to_job && will_arrive {
                self.lost.remove(id);
                let earlier_process = &self.tasks[message.receiver];
                if earlier_process.has_ended || earlier_process.accepted.contains(id) {
                    self.rearriving.insert(id);
                }
            } else if is_from_job || (is_to_job && !was_received) {
                self.lost.insert(id);
            } else if is_to_job {
                self.repeatable.insert(id);
            }
        }
    }

    /// Loses some of the frames that were in transit when the tasks were killed.
    fn drop_frames(&mut self, job_tasks: &BTreeSet<usize>) {
        let pairs: Vec<(usize, usize)> = self.directions.keys().copied().collect();
        for (from, to) in pairs {
            let concerns_job = job_tasks.contains(&from) || job_tasks.contains(&to);
            if concerns_job && self.below(2) == 0 {
                self.direction(from, to).network.clear();
            }
        }
    }

    /// Continues a restored task as the runtime of its library does.
    fn roll_back(&mut self, member: usize, snapshot: &BTreeMap<usize, Task>) {
        let (incarnation, now) = (self.last_incarnation, self.now);
        let mut reset_peers = Vec::new();
        for (peer, link) in &mut self.tasks[member].links {
            if link.is_peer_gone() {
                continue;
            }
            let previous_incarnation = snapshot.get(peer).map(|task| task.incarnation);
            let own_incarnation = link.incarnation();
            previous_incarnation.map(|previous| link.accept_incarnation(previous));
            if previous_incarnation.is_none() || link.incarnation() != own_incarnation {
                reset_peers.push(*peer);
            }
            link.begin_incarnation(incarnation, previous_incarnation.is_some());
        }
        let task = &mut self.tasks[member];
        task.order.roll_back(Restart {
            incarnation,
            members: snapshot.keys().map(|member| tid(*member)).collect(),
        });
        task.daemon_knows_marks = false;
        for peer in reset_peers {
            self.reset_order(member, peer);
        }
        for peer in 0..self.tasks.len() {
            let route = self.next_route();
            if let Some(link) = self.tasks[member].links.get_mut(&peer) {
                link.handle_event(now, LinkEvent::RouteUp(route));
                self.transmit(member, peer);
            }
        }
    }
}
