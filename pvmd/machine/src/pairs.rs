//! Routes that two tasks of this host have of their own, as far as the daemon has a part in them: it passes the words by
//! which they are set up, and tells each when the other one ends, leaves or moves away, because nothing of what goes over
//! such a route comes by here.

use super::io::Descriptors;
use super::route::hand_over;
use super::tasks::Task;
use super::{ConnId, Machine, Output};
use sempa_proto::Tid;
use sempa_proto::host::Held;
use sempa_proto::route::{OFFER_ADDRESSES_MAX, RouteWord};
use sempa_proto::task::ToTask;
use std::collections::{BTreeMap, BTreeSet};

/// Tasks with which one task may share rings. More go through the daemon.
pub(super) const PARTNERS_MAX: usize = 8192;

/// Which tasks here share rings, or are about to, and who waits for an answer to the offer of a direct route.
#[derive(Debug, Default)]
pub(super) struct Pairs {
    partners: BTreeMap<Tid, BTreeSet<Tid>>,
    /// For each task here that was asked: who asked, from whatever host.
    asked: BTreeMap<Tid, BTreeSet<Tid>>,
}

impl Pairs {
    /// True when the two share rings, or may do so from now on.
    fn have_room(&self, a: Tid, b: Tid) -> bool {
        let partners = |tid| self.partners.get(&tid);
        partners(a).is_some_and(|p| p.contains(&b))
            || [a, b]
                .into_iter()
                .all(|tid| partners(tid).is_none_or(|p| p.len() < PARTNERS_MAX))
    }

    /// The two share rings, or will if the offer is accepted: who offers has to hear of the other one's end either way.
    pub(super) fn join(&mut self, a: Tid, b: Tid) {
        self.partners.entry(a).or_default().insert(b);
        self.partners.entry(b).or_default().insert(a);
    }

    /// Those that share rings with this task, and do so no longer, and those that wait for its answer, which will not come.
    pub(super) fn take(&mut self, tid: Tid) -> BTreeSet<Tid> {
        let mut partners = self.partners.remove(&tid).unwrap_or_default();
        for partner in &partners {
            if let Some(theirs) = self.partners.get_mut(partner) {
                theirs.remove(&tid);
                if theirs.is_empty() {
                    self.partners.remove(partner);
                }
            }
        }
        partners.extend(self.asked.remove(&tid).unwrap_or_default());
        partners
    }

    /// An offer of a direct route was handed to this task.
    fn ask(&mut self, to: Tid, from: Tid) {
        let askers = self.asked.entry(to).or_default();
        if askers.len() < PARTNERS_MAX {
            askers.insert(from);
        }
    }

    /// The task has answered.
    fn answered(&mut self, by: Tid, asker: Tid) {
        if let Some(askers) = self.asked.get_mut(&by) {
            askers.remove(&asker);
            if askers.is_empty() {
                self.asked.remove(&by);
            }
        }
    }

    /// True when nobody shares rings with anybody.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.partners.is_empty() && self.asked.is_empty()
    }
}

impl Machine {
    /// A task's word to another one. One without descriptors finds its way as any item does; one with descriptors goes
    /// to a task that is here and listens, or comes to nothing.
    pub(super) fn task_route(
        &mut self,
        conn: ConnId,
        to: Tid,
        word: RouteWord,
        descriptors: Descriptors,
    ) {
        let Some(from) = self.conns.task(conn) else {
            return;
        };
        if let RouteWord::DirectOffer { addresses, .. } = &word
            && addresses.len() > OFFER_ADDRESSES_MAX
        {
            return self.log(format!(
                "{from} offered {} addresses for a route; it was dropped",
                addresses.len()
            ));
        }
        if let RouteWord::DirectAccept { .. } | RouteWord::DirectRefuse { .. } = word {
            self.pairs.answered(from, to);
        }
        if word.descriptors() == 0 && descriptors.count() == 0 {
            return self.deliver(
                to,
                ToTask::Route {
                    from,
                    near: false,
                    word,
                },
            );
        }
        let listens = self
            .tasks
            .get(to)
            .filter(|t| to != from && !t.hold)
            .and_then(Task::conn);
        let complete = word.descriptors() == descriptors.count();
        match listens.filter(|_| complete && self.pairs.have_room(from, to)) {
            Some(conn) => {
                self.pairs.join(from, to);
                let message = ToTask::Route {
                    from,
                    near: true,
                    word,
                };
                self.out.push_back(Output::RouteToTask {
                    conn,
                    message,
                    descriptors,
                });
            }
            None => self.word_came_to_nothing(from, to, &word),
        }
    }

    /// A word with descriptors was not passed on. Who offered is refused; who accepted must not take the rings for good.
    fn word_came_to_nothing(&mut self, from: Tid, to: Tid, word: &RouteWord) {
        match *word {
            RouteWord::RingOffer { id, .. } => {
                self.deliver(
                    from,
                    ToTask::Route {
                        from: to,
                        near: false,
                        word: RouteWord::RingRefuse { id },
                    },
                );
            }
            // It is a help, no more.
            RouteWord::StoreOffer { .. } => {}
            _ if self.tasks.get(to).is_some() => self.deliver(from, ToTask::PeerMoved { tid: to }),
            _ => self.deliver(from, ToTask::PeerGone { tid: to }),
        }
    }

    /// A task has ended or left: nobody here shares rings with it any more, and nobody gets an answer from it.
    pub(super) fn rings_end(&mut self, tid: Tid) {
        for partner in self.pairs.take(tid) {
            self.deliver(partner, ToTask::PeerGone { tid });
        }
    }

    /// Hands something to a task on its connection. Whether two tasks are near each other, only this moment says.
    pub(super) fn hand(&mut self, conn: ConnId, mut held: Held) {
        if let Held::Item(ToTask::Route { from, near, word }) = &mut held {
            *near = match word {
                // Who is just arriving will take rings soon.
                RouteWord::RingRefuse { .. } => self.is_alive(*from),
                _ => self.tasks.get(*from).is_some(),
            };
            if let (RouteWord::DirectOffer { .. }, Some(tid)) = (word, self.conns.task(conn)) {
                self.pairs.ask(tid, *from);
            }
        }
        self.out.push_back(hand_over(conn, held));
    }
}

/// The task that gets to know when this cannot be handed over any more because its receiver has ended.
pub(super) fn sender_of(held: &Held) -> Option<Tid> {
    match held {
        Held::Link(frame) => {
            sempa_proto::link::LinkFrame::decode(frame.clone()).map(|frame| frame.src)
        }
        Held::Item(ToTask::Route { from, .. }) => Some(*from),
        Held::Item(_) => None,
    }
}
