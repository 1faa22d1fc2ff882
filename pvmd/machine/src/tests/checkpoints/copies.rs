//! Copies of checkpoints in the stores of other hosts.

use super::*;
use crate::Copies;
use crate::tests::scene::events;
use sempa_proto::checkpoint::Unwanted;
use sempa_proto::event::EventKind;

impl Scene {
    fn with_copies(seed: u64, hosts: usize, copies: Copies) -> Scene {
        Scene::with(seed, hosts, 4, |config| config.copies = copies.clone())
    }

    /// A checkpoint, and what became of its copies: who has one, how many are missing, and why.
    fn copied(&mut self) -> (String, Vec<HostId>, u32, String) {
        let set = self.made(None);
        let became = self.until_copied(&set);
        (set, became.0, became.1, became.2)
    }

    fn until_copied(&mut self, set: &str) -> (Vec<HostId>, u32, String) {
        for _ in 0..3000 {
            self.sim.pass(Micros::from_millis(10));
            let told = events(&mut self.sim, self.console)
                .into_iter()
                .rev()
                .find_map(|kind| match kind {
                    EventKind::SetCopied {
                        set: of,
                        hosts,
                        missing,
                        why,
                        ..
                    } if of == set => Some((hosts, missing, why)),
                    _ => None,
                });
            if let Some(told) = told {
                // Those that are to go have gone.
                self.sim.pass(Micros::from_millis(100));
                return told;
            }
        }
        panic!(
            "nothing was said of copies of {set} (seed {})",
            self.sim.seed
        );
    }

    /// Where copies are, with those of other sets.
    fn copies(&self) -> Vec<(HostId, String)> {
        self.sim.sets.copies()
    }
}

#[test]
fn a_checkpoint_is_copied_to_as_many_hosts_as_are_wanted_and_those_of_the_one_before_go() {
    for seed in seeds(20) {
        let mut scene = Scene::with_copies(seed, 5, Copies::Number(2));
        let (first, hosts, missing, why) = scene.copied();
        assert_eq!(
            (hosts.len(), missing, why.as_str()),
            (2, 0, ""),
            "seed {seed}"
        );
        assert!(
            !hosts.contains(&HostId::MASTER) && hosts[0] != hosts[1],
            "{hosts:?}"
        );
        let mut there = hosts.clone();
        there.sort();
        assert_eq!(
            scene.copies(),
            there
                .iter()
                .map(|at| (*at, first.clone()))
                .collect::<Vec<_>>()
        );
        let listed = scene.sets();
        assert_eq!(listed[0].copies.len(), 2, "{listed:?}");
        let (second, again, ..) = scene.copied();
        assert_eq!(
            scene.copies(),
            there
                .iter()
                .map(|at| (*at, second.clone()))
                .collect::<Vec<_>>(),
            "seed {seed}"
        );
        assert_eq!(again.len(), 2);
    }
}

#[test]
fn hosts_that_are_named_have_copies_and_no_others_and_who_cannot_is_told() {
    for seed in seeds(10) {
        let names = Copies::Hosts(vec!["h3".into(), "h9".into(), "h1".into()]);
        let mut scene = Scene::with_copies(seed, 3, names);
        let (set, hosts, missing, why) = scene.copied();
        assert_eq!((hosts, missing), (vec![host(3)], 2));
        assert_eq!(
            why,
            "h9: it is not in the virtual machine; h1: it is the master's host"
        );
        assert_eq!(scene.copies(), [(host(3), set)]);
    }
}

#[test]
fn without_a_word_nothing_is_copied() {
    let mut scene = Scene::new(1, 3, 4);
    scene.made(None);
    scene.sim.pass(Micros::from_secs(5));
    assert_eq!(scene.copies(), []);
    let said = events(&mut scene.sim, scene.console);
    assert!(
        !said
            .iter()
            .any(|kind| matches!(kind, EventKind::SetCopied { .. }))
    );
}

#[test]
fn a_host_whose_owner_is_there_keeps_no_copy_and_another_one_does() {
    for seed in seeds(10) {
        let mut scene = Scene::with_copies(seed, 3, Copies::Number(1));
        let (set, hosts, ..) = scene.copied();
        let (owned, other) = if hosts[0] == host(2) {
            (host(2), host(3))
        } else {
            (host(3), host(2))
        };
        let speaker = scene.sim.enrol(owned);
        assert_eq!(
            scene.sim.ask(speaker, stopped_until(None, Leave::Move)),
            Reply::Done
        );
        assert_eq!(scene.copies(), [(owned, set)], "what is there stays");
        // Tasks that stand still for their owner have to be able to be written.
        let (next, hosts, missing, why) = scene.copied();
        assert_eq!((hosts, missing), (vec![other], 0), "seed {seed}");
        assert!(why.contains("its owner does not want guests now"), "{why}");
        assert_eq!(
            scene.copies(),
            [(other, next)],
            "and the one before goes (seed {seed})"
        );
    }
}

#[test]
fn an_owner_who_comes_while_a_copy_is_on_its_way_does_not_get_it() {
    let mut seen = 0;
    for seed in seeds(40) {
        let mut scene = Scene::with_copies(seed, 3, Copies::Hosts(vec!["h2".into()]));
        let speaker = scene.sim.enrol(host(2));
        scene.made(None);
        scene.sim.request(speaker, stopped_until(None, Leave::Move));
        let set = scene.sim.sets.newest();
        let (hosts, missing, why) = scene.until_copied(&set);
        assert_eq!(hosts.len() as u32 + missing, 1);
        if missing == 1 {
            assert!(
                why.contains("olga is there") || why.contains("does not want guests"),
                "{why}"
            );
            assert_eq!(scene.copies(), [], "seed {seed}");
            seen += usize::from(why.contains("olga is there"));
        }
    }
    assert!(seen > 0, "the owner never came in between");
}

#[test]
fn a_lost_host_is_replaced_by_another_one_and_one_that_is_missing_is_made_when_a_host_joins() {
    for seed in seeds(20) {
        let mut scene = Scene::with_copies(seed, 4, Copies::Number(1));
        let (set, hosts, ..) = scene.copied();
        let lost = hosts[0];
        // Before its loss is known, in the middle of another checkpoint, or at rest.
        scene.sim.kill_host(lost);
        scene.sim.until("its loss is known", |sim| {
            sim.nodes[&HostId::MASTER]
                .machine
                .table()
                .get(lost)
                .is_none()
        });
        scene.sim.pass(Micros::from_secs(2));
        let now: Vec<HostId> = scene
            .copies()
            .into_iter()
            .filter(|(at, _)| *at != lost)
            .map(|(at, _)| at)
            .collect();
        assert_eq!(now.len(), 1, "seed {seed}");
        assert_eq!(scene.sets()[0].copies.len(), 1, "of {set}");
    }
    for seed in seeds(10) {
        let mut scene = Scene::with_copies(seed, 2, Copies::Number(2));
        let (set, hosts, missing, _) = scene.copied();
        assert_eq!((hosts, missing), (vec![host(2)], 1));
        let reply = scene.sim.ask(
            scene.console,
            Request::AddHosts {
                lines: vec!["h3".into()],
            },
        );
        assert!(matches!(reply, Reply::HostsAdded(_)));
        scene.sim.pass(Micros::from_secs(2));
        assert_eq!(
            scene.copies(),
            [(host(2), set.clone()), (host(3), set)],
            "seed {seed}"
        );
    }
}

#[test]
fn copies_go_with_their_set_and_with_a_job_that_has_ended_for_good() {
    for seed in seeds(20) {
        let mut scene = Scene::with_copies(seed, 3, Copies::Number(1));
        let (set, ..) = scene.copied();
        assert_eq!(scene.remove(Unwanted::Sets(vec![set])).len(), 1);
        scene.sim.pass(Micros::from_secs(1));
        assert_eq!(scene.copies(), [], "it was removed (seed {seed})");
        // Before it is its turn: another one is being copied.
        let (first, next) = (scene.made(None), scene.made(None));
        scene.remove(Unwanted::Sets(vec![first, next]));
        scene.sim.pass(Micros::from_secs(1));
        assert_eq!(scene.copies(), [], "seed {seed}");
        // Removed at any moment while it is copied.
        let set = scene.made(None);
        let wait = Micros(scene.sim.dice.roll(20_000));
        scene.sim.pass(wait);
        scene.remove(Unwanted::Sets(vec![set]));
        scene.sim.pass(Micros::from_secs(1));
        assert_eq!(scene.copies(), [], "seed {seed}");
        scene.made(None);
        let wait = Micros(scene.sim.dice.roll(20_000));
        scene.sim.pass(wait);
        assert!(scene.ends(0, 0), "it has ended well");
        assert_eq!(scene.copies(), [], "seed {seed}");
    }
}

#[test]
fn why_a_host_takes_no_more_of_a_copy_it_says_itself_and_only_of_who_is_silent_the_sender_does() {
    for seed in seeds(20) {
        for silent in [false, true] {
            let mut scene = Scene::with_copies(seed, 3, Copies::Number(2));
            scene.made(None);
            scene.sim.faults.step_fails_percent = 100;
            scene.sim.sets.silent = silent;
            let set = scene.sim.sets.newest();
            let (hosts, missing, why) = scene.until_copied(&set);
            // A copy may have arrived before.
            assert_eq!(hosts.len() as u32 + missing, 2, "{why} (seed {seed})");
            let (by_host, by_sender) = (
                why.matches("thrown").count(),
                why.matches("nothing more was taken").count(),
            );
            let said = if silent {
                (0, missing as usize)
            } else {
                (missing as usize, 0)
            };
            assert_eq!((by_host, by_sender), said, "{why} (seed {seed})");
        }
    }
}

#[test]
fn a_transfer_that_fails_or_a_host_that_dies_in_the_middle_is_told_and_the_next_one_is_asked() {
    for seed in seeds(40) {
        let mut scene = Scene::with_copies(seed, 4, Copies::Number(1));
        scene.made(None);
        let wait = Micros(scene.sim.dice.roll(5_000));
        scene.sim.pass(wait);
        let victim = host(2 + scene.sim.dice.roll(3) as u16);
        scene.sim.kill_host(victim);
        let set = scene.sim.sets.newest();
        scene.sim.pass(Micros::from_secs(30));
        let living: Vec<(HostId, String)> = scene
            .copies()
            .into_iter()
            .filter(|(at, _)| *at != victim)
            .collect();
        assert_eq!(living.len(), 1, "seed {seed}");
        assert_eq!(living[0].1, set);
    }
}
