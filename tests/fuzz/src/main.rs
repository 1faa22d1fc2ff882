//! Passes random inputs to the readers. The first argument is the number of inputs (default: one
//! million). The second argument is the seed (default: 1).

fn main() {
    let number_argument = |index: usize, default_number: u64| {
        std::env::args()
            .nth(index)
            .and_then(|n| n.parse().ok())
            .unwrap_or(default_number)
    };
    let (input_count, mut rng) = (
        number_argument(1, 1_000_000),
        sempa_fuzz::InputRng(number_argument(2, 1).max(1)),
    );
    for _ in 0..input_count {
        sempa_fuzz::read_input(&rng.next_random_input());
    }
    println!("{input_count} inputs, nothing broke");
}
