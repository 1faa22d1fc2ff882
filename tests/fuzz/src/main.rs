//! Passes random inputs to the readers. The first argument is the number of inputs (default: one
//! million). The second argument is the seed (default: 1). With the third argument `images` only
//! the readers of images get the inputs.

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
    let only_images = std::env::args().nth(3).is_some_and(|part| part == "images");
    for _ in 0..input_count {
        let input = rng.next_random_input();
        match (only_images, &*input) {
            (false, input) => sempa_fuzz::read_input(input),
            (true, [order, body @ ..]) => {
                sempa_fuzz::images::read_images(*order, body);
            }
            (true, []) => {}
        }
    }
    if only_images {
        sempa_fuzz::images::remove_directory();
    }
    println!("{input_count} inputs, nothing broke");
}
