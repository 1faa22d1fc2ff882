//! The links of simulated processes.

use super::Received;
use super::Sim;
use crate::Event;
use sempa_proto::Tid;
use sempa_proto::causal::Mark;
use sempa_proto::ids::RouteId;
use sempa_proto::link::{Link, LinkEvent, LinkOutput};
use sempa_proto::task::ToDaemon;

impl Sim {
    /// Tells the daemon the messages that are in transit in the task's past.
    pub(in crate::tests) fn tell_marks(&mut self, proc: usize, marks: Vec<Mark>) {
        let (conn, host_id) = (
            self.procs[proc].conn.expect("connected"),
            self.procs[proc].host,
        );
        let message = ToDaemon::Past {
            clock: 1,
            marks: Some(marks),
        };
        self.send_from_proc(conn, host_id, Event::TaskControl { conn, message });
    }

    /// Sends the frames of the links of a process and stores the messages that the links deliver.
    pub(super) fn carry_out_link_outputs(&mut self, proc: usize) {
        let now = self.now;
        let p = &mut self.procs[proc];
        if p.exited || p.is_frozen() {
            return;
        }
        let mut frames = Vec::new();
        for (peer, link) in &mut p.links {
            while let Some(output) = link.poll(now) {
                match output {
                    LinkOutput::Deliver(body) => p.received.push(Received::Message(*peer, body)),
                    LinkOutput::Transmit(frame) => frames.push(frame),
                }
            }
        }
        p.deliver_notifications();
        let (conn, host_id) = (p.conn, p.host);
        for frame in frames {
            if let Some(conn) = conn {
                let bytes = [&frame.encode_head()[..], &frame.payload].concat().into();
                self.send_from_proc(conn, host_id, Event::TaskLink { conn, frame: bytes });
            }
        }
    }

    pub(super) fn notify_links(&mut self, proc: usize, event: &LinkEvent) {
        let now = self.now;
        self.procs[proc]
            .links
            .values_mut()
            .for_each(|l| l.handle_event(now, event.clone()));
        self.carry_out_link_outputs(proc);
    }

    pub(super) fn link_to(&mut self, proc: usize, peer: Tid) -> &mut Link {
        let p = &mut self.procs[proc];
        let (tid, route, now, incarnation) =
            (p.tid(), RouteId(p.route_number), self.now, p.incarnation);
        p.links.entry(peer).or_insert_with(|| {
            let mut link = Link::new(tid, peer);
            link.begin_incarnation(incarnation, true);
            link.handle_event(now, LinkEvent::RouteUp(route));
            link
        })
    }
}
