//! When a dump is begun again that met another one on its way: after pauses that grow and that chance spreads, so that
//! those who cross do not cross for ever, and in all no longer than [`CROSSING_WITHIN`].

use sempa_proto::Micros;

/// The first pause is shorter than this; each further one may be twice as long.
const PAUSE_FIRST_MAX: Micros = Micros::from_millis(8);
/// No pause is longer.
const PAUSE_MAX: Micros = Micros::from_millis(500);
/// A dump that still crosses others so long after its first attempt has failed. Well within what a move allows for its dump.
pub const CROSSING_WITHIN: Micros = Micros::from_secs(30);

/// The attempts of one dump.
#[derive(Clone, Copy, Debug)]
pub struct Again {
    pause_max: Micros,
}

impl Default for Again {
    fn default() -> Again {
        Again {
            pause_max: PAUSE_FIRST_MAX,
        }
    }
}

impl Again {
    /// How long to wait before the next attempt, `spent` after the beginning of the first; `None`: no longer. `roll` is any
    /// random number.
    pub fn pause(&mut self, spent: Micros, roll: u64) -> Option<Micros> {
        let left = CROSSING_WITHIN.since(spent);
        let pause = Micros(1 + roll % self.pause_max.0).min(left);
        self.pause_max = Micros(self.pause_max.0 * 2).min(PAUSE_MAX);
        (left > Micros(0)).then_some(pause)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Dice(u64);

    impl Dice {
        fn roll(&mut self) -> u64 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            self.0 >> 16
        }
    }

    /// Dumps that begin at the same moment in one directory. Each attempt takes `start` until the engine wants the
    /// directory, and then has it for `hold`; whoever comes meanwhile has crossed it. How many attempts each took until it
    /// had the directory to itself; panics when one gives up.
    fn attempts(dumps: usize, start: Micros, hold: Micros, seed: u64) -> Vec<u32> {
        let mut dice = Dice(seed);
        let mut waiting: Vec<(Micros, usize, Again, u32)> = (0..dumps)
            .map(|dump| (start, dump, Again::default(), 1))
            .collect();
        let (mut taken, mut free_at) = (vec![0; dumps], Micros(0));
        while let Some(at) = (0..waiting.len()).min_by_key(|at| waiting[*at].0) {
            let (now, dump, again, count) = &mut waiting[at];
            if free_at <= *now {
                free_at = *now + hold;
                taken[*dump] = *count;
                waiting.swap_remove(at);
                continue;
            }
            let pause = again
                .pause(*now, dice.roll())
                .unwrap_or_else(|| panic!("dump {dump} of {dumps} gives up"));
            *now = *now + pause + start;
            *count += 1;
        }
        taken
    }

    #[test]
    fn two_that_cross_do_not_cross_for_ever() {
        for seed in 1..200 {
            let taken = attempts(2, Micros::from_millis(30), Micros::from_millis(1), seed);
            assert!(
                taken.iter().all(|count| *count <= 8),
                "{taken:?} (seed {seed})"
            );
        }
    }

    #[test]
    fn as_many_as_may_move_at_once_all_get_their_turn_also_on_a_slow_machine() {
        for hold in [1, 10, 100] {
            for seed in 1..20 {
                let taken = attempts(64, Micros::from_millis(30), Micros::from_millis(hold), seed);
                let most = taken.iter().max().copied().unwrap_or(0);
                assert!(most <= 64, "{most} attempts (hold {hold} ms, seed {seed})");
            }
        }
    }

    #[test]
    fn pauses_grow_up_to_their_limit_and_end_with_the_time() {
        let mut again = Again::default();
        let longest: Vec<u64> = (0..9)
            .map_while(|_| again.pause(Micros(0), u64::MAX - u64::MAX % again.pause_max.0 - 1))
            .map(|p| p.0)
            .collect();
        assert_eq!(longest[..3], [8_000, 16_000, 32_000]);
        assert_eq!(longest[8], PAUSE_MAX.0);
        assert_eq!(
            again.pause(CROSSING_WITHIN.since(Micros(5)), 77_777),
            Some(Micros(5)),
            "the last one ends in time"
        );
        assert_eq!(again.pause(CROSSING_WITHIN, 1), None);
    }
}
