"""What planned passes need, given in place to models that anyone's builder has built (`equipped.equip`)."""
